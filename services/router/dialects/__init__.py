"""HTTP APIs of others are translated to GenerateRequest and from GenerateResponse. No I/O, no clock."""
