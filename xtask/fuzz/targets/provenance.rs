//! The pin file: no input panics, and an error names the place.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use xtask::pins::Pin;

fuzz_target!(|text: &str| {
    if let Err(error) = Pin::parse(Path::new("PROVENANCE"), text) {
        assert!(error.message().contains("PROVENANCE") && error.hint_text().is_some());
    }
});
