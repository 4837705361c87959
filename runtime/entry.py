"""Where krun begins: what it needs is loaded only once an interrupt is safe."""

from layout.early_exit import leave_on_interrupt


def main() -> None:
    """Run krun."""
    leave_on_interrupt("krun")
    from runtime.cli import main as run

    run()
