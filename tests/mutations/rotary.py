"""Mutations of promises about rotary embeddings, and about keys that are rotated by them."""

from mutation import Mutation

DECODER = "tests/operators/test_decoder.py::test_logits_equal_those_of_transformers"
LENGTH = "tests/engine/test_original_length.py::test_a_sequence_has_the_angles_of_its_own_length"

ROTARY: dict[str, Mutation] = {
    "the value of Phi-3 has the rows of the key": Mutation(
        "ktqueue/operators/fused_rows.py",
        "_VALUE: (query + key, key)",
        "_VALUE: (query, key)",
        (f"{DECODER}[phi3]",),
    ),
    "a file's factor of cosines is ignored": Mutation(
        "ktqueue/loading/gguf/checkpoint.py",
        "dict.fromkeys(layout.rope_lists, scale)",
        "dict.fromkeys(layout.rope_lists, 1.0)",
        ("tests/loading/gguf/test_rope_factors.py::test_longrope_has_the_same_angles_in_a_file[phi3-changes0]",),
    ),
    "pages are shared between short and long sequences": Mutation(
        "ktqueue/engine/sequence.py",
        "_ROOTS[is_rotated]",
        "_ROOTS[False]",
        (f"{LENGTH}[exact on cpu]",),
    ),
    "a sequence keeps its angles when it grows": Mutation(
        "ktqueue/engine/scheduler.py",
        "if running.rotary_offset != running.needed_offset\n",
        "if False\n",
        (f"{LENGTH}[exact on cpu]",),
    ),
    "adjacent rotary columns are not moved": Mutation(
        "ktqueue/operators/rotary_rows.py",
        "    return HalvedRotaryRows(weights, head_dim, interleaved) if interleaved else weights",
        "    return weights",
        (f"{DECODER}[ernie4_5_moe]",),
    ),
}
