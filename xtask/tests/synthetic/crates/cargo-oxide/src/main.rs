//! Stands in for cargo-oxide: takes the same arguments and environment, and has llc write one PTX file.
//!
//! It appends what it saw to the target folder's `calls.txt` and writes `seen.txt`, so that tests can read it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |flag: &str| {
        let place = arguments.iter().position(|argument| argument == flag);
        place.and_then(|place| arguments.get(place + 1)).cloned().unwrap_or_else(|| fail(flag))
    };
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| fail(name));
    if !PathBuf::from(variable("CUDA_OXIDE_BACKEND")).is_file() {
        fail::<()>("the backend");
    }
    let arch = after("--arch");
    let target = PathBuf::from(after("--cargo-target-dir"));
    let ptx = PathBuf::from(variable("CUDA_OXIDE_PTX_DIR")).join("kiln_device.ptx");
    let mut calls = fs::read_to_string(target.join("calls.txt")).unwrap_or_default();
    let contraction = std::env::var("CUDA_OXIDE_NO_FMA").unwrap_or_default();
    calls.push_str(&format!("arch={arch} no_fma={contraction} ptx={}\n", ptx.exists()));
    fs::create_dir_all(target.join("release")).unwrap();
    fs::write(target.join("calls.txt"), calls).unwrap();
    let folder = std::env::current_dir().unwrap();
    let libraries = std::env::var("LIBRARY_PATH").unwrap_or_default();
    let seen = format!("{}\nLIBRARY_PATH={libraries}\n{}\n", folder.display(), arguments[1..].join(" "));
    fs::write(target.join("seen.txt"), seen).unwrap();
    if !ptx.exists() {
        let status = Command::new(variable("CUDA_OXIDE_LLC"))
            .args([&format!("-mcpu={arch}"), "-o"])
            .arg(&ptx)
            .status()
            .unwrap();
        if !status.success() {
            exit(status.code().unwrap_or(1));
        }
    }
    let program = target.join("release/kiln");
    fs::write(&program, KILN).unwrap();
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A self-test and gates that fail with a planted defect.
const KILN: &str = r#"#!/bin/sh
echo "kiln $*"
case $1,$* in
gate,*--plant*) echo "$2      RED    1 of 5 differ (0.0 s)"; echo "DONE total=1 red=1 skipped=0 wall=0.0"; exit 1 ;;
gate,*) echo "$2      green  5 compared (0.0 s)"; echo "DONE total=1 red=0 skipped=0 wall=0.0"; exit 0 ;;
esac
case " $* " in *" --plant "*) echo "5 compared, 1 failed"; exit 1 ;; esac
echo "5 compared, 0 failed"
"#;

fn fail<T>(what: &str) -> T {
    eprintln!("synthetic cargo-oxide: no {what}");
    exit(3)
}
