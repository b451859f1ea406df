"""One command for a fresh GPU host: what runs on CUDA, is it right, how fast is it (make gpu)."""
