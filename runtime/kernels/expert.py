"""One routed expert: w2(SiTU(w1 z, w3 z)), its weights decoded from the bytes of its record."""

from torch import Tensor

from layout.record import RecordLayout
from runtime.kernels.mxfp4 import decode_mxfp4
from runtime.kernels.rows import by_rows
from runtime.kernels.situ import situ


def expert_forward(record: Tensor, layout: RecordLayout, z: Tensor, *, situ_beta: float, situ_linear_beta: float, is_tiled: bool) -> Tensor:
    """Return the expert's output for each row.

    record   uint8 [layout.n_bytes], on the device of z
    z        float32 [rows, latent]
    returns  float32 [rows, latent]
    """
    gate, down, up = (_matrix(record, layout, name) for name in ("w1", "w2", "w3"))

    def run(rows: Tensor) -> Tensor:
        return situ(rows @ gate.T, rows @ up.T, beta=situ_beta, linear_beta=situ_linear_beta) @ down.T

    return by_rows(run, z.unsqueeze(0), is_tiled=is_tiled).squeeze(0)


def _matrix(record: Tensor, layout: RecordLayout, name: str) -> Tensor:
    segments = (layout.segment(f"{name}.{part}") for part in ("packed", "scale"))
    return decode_mxfp4(*(record[s.offset : s.end].view(s.n_rows, s.n_cols) for s in segments))
