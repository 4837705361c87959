"""Where kprep begins: what it needs is loaded only once an interrupt is safe."""

from layout.early_exit import leave_on_interrupt


def main() -> None:
    """Run kprep."""
    leave_on_interrupt("kprep")
    from prep.cli import main as run

    run()
