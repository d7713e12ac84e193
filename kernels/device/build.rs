//! Tells the entries which instructions the target has: `overlap` from Hopper (sm_90) on. And whether the PTX of another
//! compiler than the backend's llc is embedded: `other_ptx`, with its path in KILN_DEVICE_PTX.

use std::path::Path;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(overlap)");
    println!("cargo::rustc-check-cfg=cfg(other_ptx)");
    println!("cargo::rerun-if-env-changed=CUDA_OXIDE_TARGET");
    println!("cargo::rerun-if-env-changed=KILN_DEVICE_PTX");
    println!("cargo::rerun-if-changed=build.rs");
    let target = std::env::var("CUDA_OXIDE_TARGET").unwrap_or_default();
    let number: String = target.trim_start_matches("sm_").chars().take_while(char::is_ascii_digit).collect();
    if number.parse::<u32>().is_ok_and(|number| number >= 90) {
        println!("cargo::rustc-cfg=overlap");
    }
    // Named before it is there: the first of two builds makes the IR that it is compiled from.
    let ptx = std::env::var("KILN_DEVICE_PTX").unwrap_or_default();
    if !ptx.is_empty() {
        println!("cargo::rerun-if-changed={ptx}");
        if Path::new(&ptx).is_file() {
            println!("cargo::rustc-cfg=other_ptx");
            println!("cargo::rustc-env=KILN_DEVICE_PTX={ptx}");
        }
    }
}
