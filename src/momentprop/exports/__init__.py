"""Converted networks as files: torch.export archives, compiled packages, ONNX."""
