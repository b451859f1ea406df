"""What a layer sees of the pages, and attention over them: chunks by torch, single tokens by kernels."""
