"""The names by which rules find operators."""

from ktqueue.operators.registry import OPERATORS


def test_rules_name_operators_by_their_class() -> None:
    assert sorted(OPERATORS) == ["CpuDecoder", "CpuExperts", "CpuLinear", "GpuDecoder", "LatentAttention"]
    assert all(operator.__name__ == name for name, operator in OPERATORS.items())
