//! Cargo's configuration: no input panics; the flags are those of their origins, in order.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use xtask::machine::cargo_config::CargoConfig;
use xtask::base::env::Env;

fuzz_target!(|bytes: &[u8]| {
    let base = tempfile::tempdir().unwrap();
    let folder = base.path().join(".cargo");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("config.toml"), bytes).unwrap();
    let home = base.path().join("home");
    let env = Env::of([("CARGO_HOME", home.as_path())], base.path());
    let Ok(config) = CargoConfig::load(base.path(), &env) else { return };
    let _ = config.overrides();
    if let Ok(flags) = config.host_flags(Path::new("/no/such/rustc"), "x86_64-unknown-linux-gnu") {
        let joined: Vec<_> = flags.origin.iter().flat_map(|origin| origin.flags.clone()).collect();
        assert_eq!(joined, flags.flags);
    }
});
