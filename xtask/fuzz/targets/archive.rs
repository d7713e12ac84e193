//! Archives: whatever the stream holds, nothing outside of the staging folder is touched, and what is unpacked can be
//! hashed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use xtask::source::archive::{Limits, RootRule, unpack_tar};

fuzz_target!(|bytes: &[u8]| {
    let base = tempfile::tempdir().unwrap();
    let into = base.path().join("into");
    std::fs::write(base.path().join("beside"), "beside").unwrap();
    let limits = Limits { entries: 64, bytes: 1 << 16, name: 256 };
    let root = if bytes.len().is_multiple_of(2) { RootRule::One } else { RootRule::Bare };
    if unpack_tar(bytes, &into, root, &limits).is_ok() {
        xtask::source::nar::hash_tree(&into).unwrap();
    }
    let mut names: Vec<_> = std::fs::read_dir(base.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names.retain(|name| name != "into");
    assert_eq!(names, ["beside"]);
    assert_eq!(std::fs::read(base.path().join("beside")).unwrap(), b"beside");
});
