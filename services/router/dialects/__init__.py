"""HTTP APIs of others are translated to GenerateRequest and from GenerateResponse, without I/O or a clock."""
