//! Model files: whatever the bytes are, they are an error or a model that runs; never a panic, a hang or an excess of memory.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = kiln_engine::fuzz::consume(bytes.to_vec());
});
