//! PTX and llc's complaints: no input panics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use xtask::ptx::{Expectation, Ptx, check, llc_complaint};

fuzz_target!(|text: &str| {
    let ptx = Ptx::parse(text);
    for arch in ["sm_86", "sm_90a"] {
        let expectation = Expectation { arch: arch.parse().unwrap(), contraction_off: true };
        if let Err(error) = check(&ptx, &expectation, "fuzz.ptx", "llc") {
            assert!(!error.message().is_empty());
        }
    }
    let _ = llc_complaint(text);
});
