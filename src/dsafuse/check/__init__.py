"""PROOF: named cases, hostile inputs, byte comparison, float64 references and timing; for tests, CLI and benchmarks."""
