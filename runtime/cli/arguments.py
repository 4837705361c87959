"""Flags that several of krun's commands share."""

from pathlib import Path
from typing import Annotated

import typer

ManifestOption = Annotated[Path, typer.Option("-m", "--manifest", metavar="MANIFEST", help="manifest.yaml, or the directory that holds it.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; without it cuda where there is one.")]
VERIFY_EVERY = 16
VRAM_OPTION = typer.Option(metavar="SIZE", help="Records kept on the device: 27.5GB, 512MB, 16slots, or auto.")
HOST_OPTION = typer.Option(metavar="SIZE", help="Records kept in host memory, on their way and after: a size, or auto.")
VERIFY_OPTION = typer.Option(metavar="N", min=0, help="Check the hash of every Nth record that is read; 0 for none.")
