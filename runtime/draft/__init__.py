"""Drafters guess the next tokens, which the model then checks several at a time. A wrong guess costs time and never changes a token."""
