"""What a sublayer computed for the residual, until the next norm adds it."""

from typing import Any, NamedTuple

import torch

from ktqueue.operators.gpu.kernels.norm import add_rms_norm


class PendingResidual(NamedTuple):
    """Results of a sublayer that are not added to the residual yet. The next norm adds them (see add_rms_norm).

    added, shared: [tokens, hidden], shared_gate: [tokens, 1] and partials: [tokens, slots, hidden], of any float type.
    experts_norm: of the sum of `added` and `partials`; norm: of the sum of all, which then is what is added;
    None: there is none. scale: factor of the residual after the addition. added_rows: see add_rms_norm.
    """

    added: torch.Tensor | None = None
    partials: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    experts_norm: torch.Tensor | None = None
    scale: float = 1.0
    added_rows: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to add."""
        return self.added is None and self.partials is None and self.shared is None

    def add_to(
        self, residual: torch.Tensor, norm: torch.Tensor, epsilon: float, **copies: torch.Tensor | None
    ) -> torch.Tensor:
        """Add the results to the residual [tokens, hidden] in place. Returns the RMSNorm of the sum, also in `copies`:
        see add_rms_norm."""
        of_experts = "added", "added_rows", "partials"
        parts: dict[str, Any] = {name: getattr(self, name) for name in (*of_experts, "shared", "shared_gate")}
        if self.experts_norm is not None:
            experts = {name: parts.pop(name) for name in of_experts}
            parts["added"] = add_rms_norm(torch.zeros_like(residual), self.experts_norm, epsilon, **experts)
        if self.norm is not None:
            parts = {"added": add_rms_norm(torch.zeros_like(residual), self.norm, epsilon, **parts)}
        return add_rms_norm(residual, norm, epsilon, **parts, **copies, scale=self.scale)
