"""The chat format: messages to tokens, tokens to messages, and a conversation in this process."""
