"""Our own process starts SGLang here, sends it requests, and reads its reports."""
