//! Tells the entries which instructions the target has: `overlap` from Hopper (sm_90) on.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(overlap)");
    println!("cargo::rerun-if-env-changed=CUDA_OXIDE_TARGET");
    println!("cargo::rerun-if-changed=build.rs");
    let target = std::env::var("CUDA_OXIDE_TARGET").unwrap_or_default();
    let number: String = target.trim_start_matches("sm_").chars().take_while(char::is_ascii_digit).collect();
    if number.parse::<u32>().is_ok_and(|number| number >= 90) {
        println!("cargo::rustc-cfg=overlap");
    }
}
