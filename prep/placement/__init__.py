"""Which drive holds which copies: decided, carried out, taken back."""
