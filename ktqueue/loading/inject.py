"""Carries out a plan: puts operators in the place of modules. Knows no files and loads no weights."""

from torch import nn

from ktqueue.core.errors import RuleError
from ktqueue.loading.plan import LoadPlan
from ktqueue.operators.base import Operator
from ktqueue.operators.registry import operator_class


def inject(model: nn.Module, plan: LoadPlan) -> tuple[nn.Module, dict[str, Operator]]:
    """Replace modules of `model` as `plan` says.

    Returns the new model, which may itself be an operator, and the operators by module name. Their weights are not
    loaded yet. Raises RuleError with file:line if an operator cannot replace a module or does not have an option.
    """
    operators: dict[str, Operator] = {}
    for replacement in plan.replacements:
        module = model.get_submodule(replacement.name)
        try:
            operator = operator_class(replacement.op).from_module(module, **replacement.options)
        except Exception as error:  # an operator of a package can fail in any way
            kind = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
            raise RuleError(f"{replacement.source}: {replacement.name or 'the model'}: {kind}{error}") from error
        if not isinstance(operator, Operator):
            raise RuleError(
                f"{replacement.source}: {replacement.name or 'the model'}: {replacement.op}.from_module returned "
                f"{type(operator).__name__}, not an operator"
            )
        operator.device = plan.device_of(replacement.name)
        operators[replacement.name] = operator
        if not replacement.name:
            return operator, operators  # the operator is the whole model
        parent, _, leaf = replacement.name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, operator)
    return model, operators
