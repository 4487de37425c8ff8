"""files: networks that are ONNX files; read, run by torch, and written again."""
