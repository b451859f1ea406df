"""From logits to tokens: constraints and biases on them, the choice, and what is told of it."""
