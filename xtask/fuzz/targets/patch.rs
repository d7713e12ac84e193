//! Patches: no input panics; a patch that does not apply changes nothing, and none changes anything outside.
#![no_main]

use libfuzzer_sys::fuzz_target;
use xtask::source::nar::hash_tree;
use xtask::source::patch::{Patch, apply_series};

fuzz_target!(|bytes: &[u8]| {
    let Ok(patch) = Patch::parse("fuzz.patch", bytes) else { return };
    let base = tempfile::tempdir().unwrap();
    let tree = base.path().join("tree");
    std::fs::create_dir_all(tree.join("crates")).unwrap();
    std::fs::write(tree.join("crates/f.txt"), "one\ntwo\nthree\n").unwrap();
    std::fs::write(tree.join("g"), "no line end").unwrap();
    std::os::unix::fs::symlink("crates", tree.join("link")).unwrap();
    let before = hash_tree(&tree).unwrap();
    if apply_series(&[patch], &tree).is_err() {
        assert_eq!(hash_tree(&tree).unwrap(), before);
    }
    assert_eq!(std::fs::read_dir(base.path()).unwrap().count(), 1);
});
