"""What decode computes besides its weight products, each operation once at small sizes beside its plain form in float64.

A check is a line of a table: a name, inputs, how to run the kernel, what it should give, and how far it may be off. The same table serves the
self-test before a run and `krun doctor`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.kernels.groups import Groups, group_resident, groups_of
from runtime.kernels.indexer import append_index_keys_, select_in_cache
from runtime.kernels.kda import kda_decode_
from runtime.kernels.mla import SPLIT_POSITIONS, attend_in_cache, mla_decode_
from runtime.kernels.norms import rms_norm, rms_norm_gated
from runtime.kernels.residual import add_mix_and_norm_, mix_and_norm
from runtime.kernels.router import combine_and_norm, route
from runtime.kernels.situ import situ_halves

# Of a float32 result of some hundred terms, relative to the root mean square of the outputs: rounding gives 3e-6 at most.
TOLERANCE = 1e-5
# A kernel that is no further off is not wrong but imprecise: that is said, and the run goes on. What is broken is off by much more.
IMPRECISE = 1e-3
_EPS = 1e-5


class Check(NamedTuple):
    """One operation at one size.

    inputs     makes the arguments; what is random in them is float32
    run        computes as decode does, in place too, and returns tensors
    expected   returns the same tensors from copies of the arguments, their float32 turned into float64: then the plain forms compute
    tolerance  of each tensor, relative to the root mean square of what is expected; of zeros nothing may differ
    is_product whether the kernel is one of products.cu, for which Triton has another
    is_prompt  whether only prompts need it, which plain torch can run instead
    """

    name: str
    inputs: Callable[[torch.Generator], tuple[Any, ...]]
    run: Callable[..., tuple[Tensor, ...]]
    expected: Callable[..., tuple[Tensor, ...]]
    tolerance: float = TOLERANCE
    is_product: bool = False
    is_prompt: bool = False

    def error(self, device: torch.device) -> float:
        """Return the largest error of any element of any result, relative to the result's root mean square; infinite for a NaN."""
        arguments = self.inputs(torch.Generator(device).manual_seed(1))
        expected = self.expected(*(exact(x) for x in arguments))
        return max(_error(found, wanted) for found, wanted in zip(self.run(*arguments), expected, strict=True))

    def agrees(self, device: torch.device) -> bool:
        return self.error(device) <= self.tolerance


def _error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    most, size = (found - expected).abs().max().item(), expected.pow(2).mean().sqrt().item()
    if most == 0.0:
        return 0.0
    return most / size if size > 0.0 and math.isfinite(most) else math.inf


def exact(x: Any) -> Any:
    """Return a copy of an argument, float64 if it is float32."""
    if not isinstance(x, Tensor):
        return x
    return x.double() if x.dtype is torch.float32 else x.clone()


def randn(source: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=source, device=source.device)


def _in_float64(name: str, inputs: Callable[[torch.Generator], tuple[Any, ...]], run: Callable[..., tuple[Tensor, ...]]) -> Check:
    """An operation whose plain form is the function itself: no kernel takes float64."""
    return Check(name, inputs, run, run)


def _run_norm(x: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm(x, gain, eps=_EPS, is_tiled=True),)


def _run_gated_norm(x: Tensor, gain: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm_gated(x, gain, gate, eps=_EPS, is_tiled=True),)


def _run_mix(bank: Tensor, total: Tensor, first: Tensor, second: Tensor, score: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    """As decode mixes: with nothing to add, with one addend and with two."""
    alone = mix_and_norm(bank, total, score, gain, eps=_EPS, is_tiled=True)
    one = add_mix_and_norm_(bank, total, (first,), score, gain, eps=_EPS)
    two = add_mix_and_norm_(bank, total, (first, second), score, gain, eps=_EPS)
    return *alone, *one, *two, total


def _run_route(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    ids, weights = route(logits, bias, 6, scaling=2.5, is_tiled=True)
    return ids.double(), weights


def _run_combine(outputs: Tensor, weights: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    return (combine_and_norm(outputs, weights, gain, eps=_EPS, is_tiled=True),)


def _run_situ(gate_up: Tensor) -> tuple[Tensor, ...]:
    return (situ_halves(gate_up, beta=4.0, linear_beta=25.0),)


def _run_kda(u: Tensor, z: Tensor, beta: Tensor, past: Tensor, memory: Tensor, kernel: Tensor, dt_bias: Tensor, a_log: Tensor) -> tuple[Tensor, ...]:
    """Three heads of 32."""
    o = kda_decode_(u, z, beta, past, memory, kernel=kernel, dt_bias=dt_bias, a_log=a_log, lower_bound=-5.0)
    return o, past, memory


def _kda_inputs(source: torch.Generator) -> tuple[Tensor, ...]:
    wide = randn(source, 1, 3, 3 * 96 + 96 + 32)
    u, z, beta = wide[..., :288], wide[..., 288:384], wide[..., 384:387]
    return u, z, beta, randn(source, 1, 3, 288), randn(source, 1, 3, 32, 32), randn(source, 288, 4), randn(source, 96), randn(source, 3)


def _mla_inputs(source: torch.Generator) -> tuple[Any, ...]:
    """Three tokens of two heads across the border of two splits; what the cache does not hold yet is NaN."""
    n_past, n_tok = SPLIT_POSITIONS - 1, 3
    latent, k_rot = randn(source, SPLIT_POSITIONS + 40, 64), randn(source, SPLIT_POSITIONS + 40, 16)
    latent[n_past:], k_rot[n_past:] = torch.nan, torch.nan
    quants = torch.randint(-127, 128, (2, 32 + 48, 64), generator=source, device=source.device, dtype=torch.int8)
    scales = (torch.rand(2, 32 + 48, 2, generator=source, device=source.device) * 1e-3 + 5e-4).half()
    past = torch.tensor([n_past], dtype=torch.int32, device=source.device)
    return randn(source, n_tok, 2, 48), randn(source, n_tok, 80), latent, k_rot, past, quants, scales, randn(source, 64), randn(source, n_tok, 2, 48)


def _run_mla(
    q: Tensor, kv: Tensor, latent: Tensor, k_rot: Tensor, past: Tensor, quants: Tensor, scales: Tensor, gain: Tensor, gate: Tensor
) -> tuple[Tensor, ...]:
    o, end = mla_decode_(q, kv, latent, k_rot, past, kv_b=(quants, scales), gain=gain, eps=_EPS, gate=gate), SPLIT_POSITIONS + 2
    return o, latent[:end], k_rot[:end]


def _selection_inputs(source: torch.Generator) -> tuple[Any, ...]:
    """As for an MLA step, with an indexer of four heads that selects 60 positions."""
    q, _, latent, k_rot, past, quants, scales, *_ = _mla_inputs(source)
    latent[int(past) :], k_rot[int(past) :] = 0.0, 0.0
    index_k = randn(source, len(latent), 64)
    index_k[int(past) :] = torch.nan
    return q, latent, k_rot, past, quants, scales, index_k, randn(source, 3, 64), randn(source, 3, 4, 64), randn(source, 3, 4), randn(source, 64)


def _run_selection(
    q: Tensor, latent: Tensor, k_rot: Tensor, past: Tensor, quants: Tensor, scales: Tensor, index_k: Tensor, k: Tensor, index_q: Tensor,
    weights: Tensor, gain: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    append_index_keys_(k, index_k, past, gain=gain, bias=gain, eps=_EPS)
    positions = select_in_cache(index_q, weights, index_k, past, 60)
    o = attend_in_cache(q, latent, k_rot, past, kv_b=(quants, scales), positions=positions)
    return positions.double(), o, index_k[: SPLIT_POSITIONS + 2]


def _group_inputs(source: torch.Generator) -> tuple[Tensor, ...]:
    """Five rows with four of ten experts each, of which every third has no address."""
    ids = torch.rand(5, 10, generator=source, device=source.device).argsort(-1)[:, :4].sort(-1).values
    number = torch.arange(10, device=source.device)
    return ids, torch.where(number % 3 == 0, 0, 1 + (number << 33))


def _run_groups(ids: Tensor, known: Tensor) -> tuple[Tensor, ...]:
    groups = Groups.empty(ids.numel(), ids.device)
    group_resident(ids, known, groups)
    # The lower and the upper half of an address: a float64 does not hold them together.
    return (groups.addresses & 0xFFFFFFFF).double(), (groups.addresses >> 32).double(), groups.rows.double(), groups.places.double()


def _expected_groups(ids: Tensor, known: Tensor) -> tuple[Tensor, ...]:
    """The groups that the host would make, each where the first row that chose its expert has it."""
    chosen, groups = ids.cpu().numpy(), Groups.empty(ids.numel(), torch.device("cpu"))
    groups.rows.fill_(-1)
    groups.places.fill_(-1)
    there = [expert for expert in np.unique(chosen).tolist() if known[expert] != 0]
    made = Groups.empty(len(there), torch.device("cpu"))
    groups_of(chosen, there, [int(known[expert]) for expert in there], out=made.arrays())
    leads = [int((chosen.ravel() == expert).argmax()) for expert in there]
    for table, values in zip(groups, made, strict=True):
        table[leads] = values
    addresses, rows, places = (table.to(ids.device) for table in groups)
    return (addresses & 0xFFFFFFFF).double(), (addresses >> 32).double(), rows.double(), places.double()


STEP_CHECKS = (
    _in_float64("RMS norm", lambda s: (randn(s, 1, 3, 200), randn(s, 200)), _run_norm),
    _in_float64("gated RMS norm", lambda s: (randn(s, 1, 3, 4, 96), randn(s, 96), randn(s, 1, 3, 4, 96)), _run_gated_norm),
    _in_float64(
        "residual mix", lambda s: (randn(s, 2, 1, 3, 200), *(randn(s, 1, 3, 200) for _ in range(3)), randn(s, 200) * 0.1, randn(s, 200)), _run_mix
    ),
    _in_float64("router", lambda s: (randn(s, 1, 5, 77), randn(s, 77) * 0.1), _run_route),
    _in_float64("sum of experts", lambda s: (randn(s, 1, 3, 6, 200), randn(s, 1, 3, 6), randn(s, 200)), _run_combine),
    _in_float64("SiTU", lambda s: (3 * randn(s, 1, 3, 600),), _run_situ),
    _in_float64("KDA step", _kda_inputs, _run_kda),
    _in_float64("MLA step", _mla_inputs, _run_mla),
    _in_float64("index selection", _selection_inputs, _run_selection),
    Check("resident groups", _group_inputs, _run_groups, _expected_groups, tolerance=0.0),
)
