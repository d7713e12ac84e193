//! Every tensor type against the values that the PyPI package `gguf` decodes; `fixtures.py` makes the file.

use kiln_engine::gguf::{Gguf, TensorType};
use kiln_engine::quant;

#[test]
fn every_type_decodes_to_the_golden_values() {
    let file = Gguf::from_vec("types.gguf", include_bytes!("fixtures/types.gguf").to_vec()).expect("a file");
    assert_eq!(file.tensors().len(), 2 * TensorType::ALL.len(), "the values of each type, and no others");
    for kind in TensorType::ALL {
        let tensor = &file.tensors()[&kind.to_string()];
        assert_eq!(tensor.kind, kind);
        let mut values = vec![0.0; tensor.rows() * tensor.columns()];
        quant::decode(kind, file.data(tensor), &mut values);
        let golden = file.data(&file.tensors()[&format!("{kind}.values")]);
        for (index, (value, bytes)) in values.iter().zip(golden.chunks_exact(4)).enumerate() {
            let want = f32::from_le_bytes(bytes.try_into().expect("four bytes"));
            // A sum of zeros may have either sign there; nothing else may differ.
            assert!(
                value.to_bits() == want.to_bits() || *value == 0.0 && want == 0.0,
                "{kind} {index}: {value} {want}"
            );
        }
    }
}
