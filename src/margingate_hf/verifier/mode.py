"""The strict operator mode: what each torch call of the model's own forward becomes during a verify forward.

Deny by default. A call of the model's forward is one of four things: routed to a form with a fixed order (`ROUTED`); on
the audited list of calls that are exact, or whose bits depend on one element or one row alone (`SAFE`); without a
floating-point result; or an error. Weights are up-cast where they are used, and activations are FP32 from the embedding
on. A cast of an activation to 16 bits is left out; any other call that would round one raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, resolve_name

from ..forward.backend import Backend
from ..forward.context import VerifyContext, current_context
from ..forward.fixed_plan import fixed_plan
from . import arithmetic
from .weights import WeightStore

HALF = (torch.bfloat16, torch.float16)


class StrictVerifierError(RuntimeError):
    """The model's forward used an operation that the verifier has no fixed plan for."""


class VerifierMode(TorchFunctionMode):
    """
    Routes one model forward.

    Args:
        store ([`WeightStore`]): the packed FP32 weights.
        backend ([`Backend`]): what runs sums and norms.
        strict (`bool`): raise on an unknown operation; otherwise let it run and note it in `unplanned`.
        precision (`str`, *optional*, defaults to `"float32"`): `"bfloat16"` rounds the operands of linear layers, the
            head's excepted.

    Attributes:
        unplanned (`set[str]`): names of operations let through with `strict=False`.
    """

    def __init__(self, store: WeightStore, backend: Backend, strict: bool = True, precision: str = "float32"):
        super().__init__()
        self.store = store
        self.backend = backend
        self.strict = strict
        self.precision = precision
        self.unplanned: set[str] = set()

    @contextlib.contextmanager
    def whole_operands(self) -> Iterator[None]:
        """No rounding of operands for the duration of the block."""
        before = self.precision
        try:
            self.precision = "float32"
            yield
        finally:
            self.precision = before

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(current_context(), VerifyContext):
            return func(*args, **kwargs)  # left on this thread's stack by an interrupt: inert outside a forward of ours
        handler = ROUTED.get(func)
        if handler is not None:
            with fixed_plan():
                return handler(self, func, *args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            if result.dtype in HALF:
                self._check_half(func, result, args, kwargs)
            elif result.is_floating_point() and func not in SAFE:
                self._refuse(func, "has no fixed plan")
        elif func not in SAFE and _holds_floats(result):
            self._refuse(func, "has no fixed plan")
        return result

    def _check_half(self, func: Callable, result: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """A 16-bit result is fine where it is a constant of the checkpoint, never where an activation went in."""
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and not self.store.owns(tensor):
                    self._refuse(func, f"turns an FP32 activation into {str(result.dtype).removeprefix('torch.')}")

    @staticmethod
    def drop_stale() -> None:
        """Takes modes off this thread's stack that an interrupt has left there; forwards of ours do not nest."""
        while isinstance(_top_of_stack(), VerifierMode):
            _pop_mode()

    def _refuse(self, func: Callable, why: str) -> None:
        name = resolve_name(func) or getattr(func, "__name__", repr(func))
        if self.strict:
            raise StrictVerifierError(
                f"`{name}` {why}, so the verifier cannot promise its bits. "
                "MarginGateConfig(strict=False) runs it unchanged and gives up the guarantee."
            )
        self.unplanned.add(f"{name} {why}")


def _top_of_stack() -> Any:
    stack = _get_current_function_mode_stack()
    return stack[-1] if stack else None


def _holds_floats(result: Any) -> bool:
    if not isinstance(result, (tuple, list)):
        return False
    return any(isinstance(item, torch.Tensor) and item.is_floating_point() for item in result)


def _linear(mode: VerifierMode, func: Callable, input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    rows = input.float().reshape(-1, input.shape[-1])
    precision = mode.precision
    if precision != "float32" and mode.store.is_head(weight):
        precision = "float32"
    out = mode.store.plan.linear(rows, mode.store.packed(weight), precision)
    out = out.view(*input.shape[:-1], weight.shape[0])
    return out if bias is None else out.add_(bias.float())


def _matmul(mode: VerifierMode, func: Callable, input: Any, other: Any) -> torch.Tensor:
    a, b = input, other
    if a.dim() >= 2 and b.dim() >= 2 and a.shape[-1] == 1 and b.shape[-2] == 1:
        return a.float() * b.float()  # an outer product sums nothing
    if b.dim() == 2 and mode.store.owns(b):
        return _linear(mode, func, a, b.t())
    mode._refuse(func, "between two activations has no fixed plan")
    return func(a.float(), b.float())


def _addmm(
    mode: VerifierMode, func: Callable, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta != 1 or alpha != 1 or not mode.store.owns(mat2):
        mode._refuse(func, "with scaling or on activations has no fixed plan")
        return func(input.float(), mat1.float(), mat2.float(), beta=beta, alpha=alpha)
    return _linear(mode, func, mat1, mat2.t(), input)


def _cast(mode: VerifierMode, func: Callable, input: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A cast of an FP32 activation to 16 bits, to the dtype of an adapter or a router for example, is left out."""
    result: torch.Tensor = func(input, *args, **kwargs)
    rounds = result.dtype in HALF and input.dtype == torch.float32 and not mode.store.owns(input)
    return input if rounds else result


def _norm(
    mode: VerifierMode,
    func: Callable,
    input: Any,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The 2-norm of rows."""
    if ord not in (None, 2, 2.0) or not _last_dim(mode, func, input, dim):
        mode._refuse(func, f"of order {ord!r} over dimensions {dim} has no fixed plan")
        return func(input, ord, dim, keepdim, dtype=dtype, **kwargs)
    out = mode.backend.row_sum(input.float() * input.float()).sqrt()
    return out if keepdim else out.squeeze(-1)


def _embedding(mode: VerifierMode, func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(*args, **kwargs).float()


def _last_dim(mode: VerifierMode, func: Callable, x: torch.Tensor, dim: Any) -> bool:
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    if x.is_floating_point() and (len(dims) != 1 or dims[0] not in (-1, x.dim() - 1)):
        mode._refuse(func, f"over dimensions {dim} of {x.dim()} has no fixed plan")
        return False
    return x.is_floating_point()


def _sum(backend: Backend, x: torch.Tensor) -> torch.Tensor:
    return backend.row_sum(x.float())


def _mean(backend: Backend, x: torch.Tensor) -> torch.Tensor:
    return backend.row_sum(x.float()) / x.shape[-1]


def _reduction(row_form: Callable[[Backend, torch.Tensor], torch.Tensor]) -> Callable:
    def handler(
        mode: VerifierMode, func: Callable, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> torch.Tensor:
        if not _last_dim(mode, func, input, dim):
            return func(input, **({} if dim is None else {"dim": dim, "keepdim": keepdim}), dtype=dtype)
        out = row_form(mode.backend, input)
        return out if keepdim else out.squeeze(-1)

    return handler


def _softmax(operation: str) -> Callable:
    def handler(
        mode: VerifierMode, func: Callable, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
    ) -> torch.Tensor:
        if not _last_dim(mode, func, input, dim):
            return func(input, dim=dim, dtype=dtype)
        out: torch.Tensor = getattr(mode.backend, operation)(input.float())
        return out

    return handler


def _layer_norm(
    mode: VerifierMode,
    func: Callable,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    if len(normalized_shape) != 1:
        mode._refuse(func, f"over {len(normalized_shape)} dimensions has no fixed plan")
    return mode.backend.layer_norm(input.float(), weight, bias, eps)


def _rms_norm(
    mode: VerifierMode, func: Callable, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> torch.Tensor:
    if len(normalized_shape) != 1:
        mode._refuse(func, f"over {len(normalized_shape)} dimensions has no fixed plan")
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return mode.backend.rms_norm(input.float(), weight, eps)


def _pow(mode: VerifierMode, func: Callable, input: Any, exponent: Any) -> torch.Tensor:
    if isinstance(input, torch.Tensor) and exponent == 2:
        return input * input
    if isinstance(input, torch.Tensor) and exponent == 3:
        return input * input * input
    if not (isinstance(input, torch.Tensor) and input.is_floating_point()) or not mode.store.owns(input):
        mode._refuse(func, f"with exponent {exponent!r} has no fixed plan")
    return func(input, exponent)


def _elementwise(form: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def handler(mode: VerifierMode, func: Callable, input: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("inplace", None)
        return form(input.float(), *args, **kwargs)

    return handler


def _rsqrt(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / x.sqrt()  # the library's own form is an approximation on some processors


def _dropout(
    mode: VerifierMode, func: Callable, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if training and p > 0:
        mode._refuse(func, "is random")
    return input


def _everywhere(name: str) -> list[Callable]:
    """All spellings of an operation: `torch.x`, `Tensor.x`, `F.x` and torch's own private homes of them."""
    homes = (torch, torch.Tensor, F, torch._C._nn, torch.special)
    return [getattr(home, name) for home in homes if hasattr(home, name)]


def _table() -> dict[Callable, Callable]:
    entries: dict[str, Callable] = {
        "linear": _linear,
        "matmul": _matmul,
        "__matmul__": _matmul,
        "mm": _matmul,
        "bmm": _matmul,
        "addmm": _addmm,
        "embedding": _embedding,
        "sum": _reduction(_sum),
        "mean": _reduction(_mean),
        "softmax": _softmax("softmax"),
        "log_softmax": _softmax("log_softmax"),
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "pow": _pow,
        "__pow__": _pow,
        "square": _elementwise(lambda x: x * x),
        "rsqrt": _elementwise(_rsqrt),
        "silu": _elementwise(arithmetic.silu),
        "sigmoid": _elementwise(arithmetic.sigmoid),
        "gelu": _elementwise(arithmetic.gelu),
        "softplus": _elementwise(arithmetic.softplus),
        "tanh": _elementwise(torch.tanh),
        "exp": _elementwise(torch.exp),
        "erf": _elementwise(torch.erf),
        "cos": _elementwise(torch.cos),
        "sin": _elementwise(torch.sin),
        "log": _elementwise(torch.log),
        "log1p": _elementwise(torch.log1p),
        "expm1": _elementwise(torch.expm1),
        "dropout": _dropout,
        "to": _cast,
        "bfloat16": _cast,
        "half": _cast,
        "type": _cast,
        "type_as": _cast,
    }
    table = {func: handler for name, handler in entries.items() for func in _everywhere(name)}
    return {**table, torch.linalg.norm: _norm, torch.linalg.vector_norm: _norm}


# Correctly rounded or exact per element: the bits of a result depend on its own operands alone.
_EXACT = (
    "add add_ sub sub_ rsub subtract mul mul_ multiply div div_ divide true_divide neg neg_ abs sqrt reciprocal "
    "maximum minimum clamp clamp_ clamp_min clamp_max clip relu relu_ sign floor ceil round where masked_fill "
    "masked_fill_ addcmul addcdiv __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ "
    "__truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __neg__ __abs__ hardtanh leaky_relu"
)
# Views, copies, casts and moves of whole elements.
_MOVES = (
    "view reshape view_as reshape_as transpose swapaxes permute t mT T contiguous clone detach expand expand_as "
    "broadcast_to unsqueeze unsqueeze_ squeeze squeeze_ flatten unflatten narrow select chunk split unbind "
    "tensor_split split_with_sizes unsafe_split unsafe_chunk __getitem__ __setitem__ __iter__ cat concat stack "
    "hstack vstack repeat repeat_interleave tile roll flip index_select index_fill gather scatter scatter_ "
    "take_along_dim index_copy index_copy_ index_put index_put_ index_add index_add_ masked_scatter copy_ fill_ "
    "zero_ pad to float double type type_as half bfloat16 cpu cuda data requires_grad_ zeros ones empty full "
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor tensor as_tensor "
    "arange linspace eye triu tril diagonal as_strided movedim moveaxis"
)
# Selections: a maximum has no order of summation.
_SELECTIONS = "max min amax amin argmax argmin topk sort argsort nonzero item tolist"


def _safe() -> frozenset[Callable]:
    found = {func for name in (_EXACT + " " + _MOVES + " " + _SELECTIONS).split() for func in _everywhere(name)}
    for name in ("data", "T", "mT", "real", "grad", "H"):
        found.add(getattr(torch.Tensor, name).__get__)
    found |= {torch.functional.split, torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__}
    return frozenset(func for func in found if callable(func))


ROUTED: dict[Callable, Callable] = _table()
SAFE: frozenset[Callable] = _safe()
