"""kprep make-tiny."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from layout.config import K3, K31
from layout.sizes import counted
from layout.terminal import ProgressLine, say
from manifests.errors import UsageError
from manifests.geometry import known_geometries, load_geometry
from prep.tiny import limit_layers, make_checkpoint

ARCHITECTURES = {"k3": K3, "k3.1": K31}


def make_tiny_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory.")],
    geometry: Annotated[str, typer.Option(help=f"One of {', '.join(known_geometries())}, or a YAML file.")] = "tiny",
    architecture: Annotated[str | None, typer.Option(help="k3 or k3.1; without it the geometry decides: k3.1 if it has an indexer.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only the first N layers.")] = None,
    sparse: Annotated[bool, typer.Option("--sparse", help="Leave holes in place of the data; sizes and headers are true.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Make a checkpoint with random weights in the published format."""
    shape = load_geometry(geometry)
    name = architecture or ("k3.1" if shape.indexer else "k3")
    if name not in ARCHITECTURES:
        raise UsageError(f"--architecture {name}: expected one of {', '.join(ARCHITECTURES)}")
    if name == "k3" and shape.indexer is not None:
        shape = dataclasses.replace(shape, indexer=None)
    if layers is not None:
        shape = limit_layers(shape, layers)
    with ProgressLine() as progress:

        def on_progress(_: str, done: int, total: int) -> None:
            progress("checkpoint", done, total)

        make_checkpoint(out, shape, architecture=ARCHITECTURES[name], seed=seed, on_progress=on_progress, is_sparse=sparse)
    values = "holes for data" if sparse else f"seed {seed}"
    say(f"made {out}: {ARCHITECTURES[name]}, {counted(shape.n_layers, 'layer')}, {counted(shape.n_experts, 'expert')} a layer, {values}")
