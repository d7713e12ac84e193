//! llc's banner: no input panics, and a version that is read is one that can be shown.
#![no_main]

use libfuzzer_sys::fuzz_target;
use xtask::machine::llc::parse_banner;

fuzz_target!(|text: &str| {
    if let Ok(banner) = parse_banner(text) {
        let _ = banner.makes_ptx();
        assert!(!format!("{banner:?}").is_empty());
    }
});
