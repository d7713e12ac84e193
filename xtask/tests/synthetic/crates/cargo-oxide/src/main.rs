//! Stands in for cargo-oxide: takes the same arguments and environment, and has llc write one PTX file, or writes NVVM IR.
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
    let output = PathBuf::from(variable("CUDA_OXIDE_PTX_DIR"));
    let nvvm = arguments.iter().any(|argument| argument == "--emit-nvvm-ir");
    let ptx = output.join(if nvvm { "kiln.ll" } else { "kiln_device.ptx" });
    let mut calls = fs::read_to_string(target.join("calls.txt")).unwrap_or_default();
    let contraction = std::env::var("CUDA_OXIDE_NO_FMA").unwrap_or_default();
    calls.push_str(&format!("arch={arch} no_fma={contraction} ptx={}\n", ptx.exists()));
    fs::create_dir_all(target.join("release")).unwrap();
    fs::write(target.join("calls.txt"), calls).unwrap();
    let folder = std::env::current_dir().unwrap();
    let libraries = std::env::var("LIBRARY_PATH").unwrap_or_default();
    let seen = format!("{}\nLIBRARY_PATH={libraries}\n{}\n", folder.display(), arguments[1..].join(" "));
    fs::write(target.join("seen.txt"), seen).unwrap();
    if nvvm {
        fs::create_dir_all(&output).unwrap();
        // As the backend, which removes what competes with its IR.
        let _ = fs::remove_file(output.join("kiln.ptx"));
        fs::write(&ptx, NVVM_IR).unwrap();
    } else if !ptx.exists() {
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
    // The PTX of another compiler is embedded where there is some.
    let other = std::env::var("KILN_DEVICE_PTX").unwrap_or_default();
    let embedded = fs::read_to_string(other).unwrap_or_default();
    fs::write(&program, format!("{KILN}exit 0\n{embedded}")).unwrap();
    fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A self-test and gates that fail with a seeded defect.
const KILN: &str = r#"#!/bin/sh
echo "kiln $*"
case $1,$* in
gate,*--plant*|gate,*--seed-defect*) echo "$2      RED    1 of 5 differ (0.0 s)"; echo "DONE total=1 red=1 skipped=0 wall=0.0"; exit 1 ;;
gate,*) echo "$2      green  5 compared (0.0 s)"; echo "DONE total=1 red=0 skipped=0 wall=0.0"; exit 0 ;;
esac
case " $* " in *" --plant "*|*" --seed-defect "*) echo "5 compared, 1 failed"; exit 1 ;; esac
echo "5 compared, 0 failed"
"#;

/// As the pin writes it: the kernel has launch bounds and is not annotated as one, the helper is visible.
const NVVM_IR: &str = r#"target triple = "nvptx64-nvidia-cuda"

define void @kernel(i8* %v0) #0 {
  call void @_RNvhelper() #0
  ret void
}
define void @_RNvhelper() #0 {
  ret void
}
@llvm.used = appending global [1 x i8*] [i8* bitcast (void (i8*)* @kernel to i8*)], section "llvm.metadata"
!0 = !{void (i8*)* @kernel, !"maxntidx", i32 256}
!nvvm.annotations = !{!0}
"#;

fn fail<T>(what: &str) -> T {
    eprintln!("synthetic cargo-oxide: no {what}");
    exit(3)
}
