"""HTTP APIs of others, each a translation of GenerateRequest and GenerateResponse. No I/O, no clock."""
