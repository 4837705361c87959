"""From bytes at rest to tokens: krun."""
