"""Makes fixtures/split-0000N-of-00003.gguf: fixtures/llama.gguf as the PyPI package gguf 0.19.0 splits it.

Run from this folder with gguf 0.19.0.
"""
import gguf

reader = gguf.GGUFReader("fixtures/llama.gguf")
count = -(-len(reader.tensors) // 3)
writer = gguf.GGUFWriter("fixtures/split.gguf", "llama", split_max_tensors=count)
for name, field in reader.fields.items():
    if name.startswith("GGUF.") or name == "general.architecture":
        continue
    kind, *rest = field.types
    writer.add_key_value(name, field.contents(), kind, rest[-1] if rest else None)
for tensor in reader.tensors:
    writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
