"""Text becomes tokens and tokens become text here: templates, tokenizers, stop strings."""
