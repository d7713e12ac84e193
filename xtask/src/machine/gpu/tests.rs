use super::*;
use crate::machine::probe::tests::script;

const BANNER: &str =
    "| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |";

fn with(body: &str) -> Resolved<Gpus> {
    let folder = tempfile::tempdir().unwrap();
    script(folder.path(), "nvidia-smi", body);
    let request = GpuRequest {
        limit: Duration::from_millis(80),
        folders: Vec::new(),
        driver_file: folder.path().join("none"),
    };
    let resolved = find_gpus(&request, &Env::of([("PATH", folder.path())], "/"));
    assert!(resolved.decision.is_good());
    let mut resolved = resolved;
    resolved.decision.why =
        resolved.decision.why.replace(&folder.path().join("nvidia-smi").display().to_string(), "SMI");
    resolved
}

fn listing(lines: &str) -> Resolved<Gpus> {
    // The limit above is for the case that hangs; a shell starts within any limit here.
    let folder = tempfile::tempdir().unwrap();
    script(
        folder.path(),
        "nvidia-smi",
        &format!("case \"$1\" in --query-gpu*) printf '%s\\n' '{lines}';; *) echo '{BANNER}';; esac"),
    );
    let request = GpuRequest { folders: Vec::new(), ..GpuRequest::default() };
    find_gpus(&request, &Env::of([("PATH", folder.path())], "/"))
}

#[test]
fn f7_several_gpus_are_listed() {
    let resolved = listing("NVIDIA RTX A6000, 8.6, 550.54.15\nOdd, name, 12.0, 550.54.15");
    let gpus = resolved.value.unwrap();
    assert_eq!(
        resolved.decision.chosen.unwrap(),
        "NVIDIA RTX A6000 (capability 8.6), Odd, name (capability 12.0)"
    );
    assert_eq!(gpus.cuda.unwrap().to_string(), "12.4");
    assert_eq!(resolved.decision.notes, ["driver 550.54.15, CUDA 12.4, PTX up to 8.4"]);
    assert_eq!(resolved.decision.change.unwrap(), "cargo xtask build --arch sm_86 --arch sm_120");
}

#[test]
fn f7_errors_on_standard_output_are_not_taken_for_gpus() {
    let sentence = "Failed to initialize NVML: Driver/library version mismatch";
    for (status, why) in [
        (0, format!("GPU unknown (not needed to build): SMI said: {sentence}")),
        (
            18,
            format!(
                "GPU unknown (not needed to build): SMI: ended with an error (exit status: 18): {sentence}"
            ),
        ),
    ] {
        // Both inputs end at once, so the short limit of the fake does not matter: start it without.
        let folder = tempfile::tempdir().unwrap();
        let tool = script(folder.path(), "nvidia-smi", &format!("echo '{sentence}'; exit {status}"));
        let request = GpuRequest {
            folders: Vec::new(),
            driver_file: folder.path().join("none"),
            ..GpuRequest::default()
        };
        let resolved = find_gpus(&request, &Env::of([("PATH", folder.path())], "/"));
        assert_eq!(resolved.decision.why.replace(&tool.display().to_string(), "SMI"), why);
        assert_eq!(resolved.value.unwrap(), Gpus::default());
    }
    for line in [
        "NVIDIA H200, [N/A], 580.1",
        "NVIDIA H200, 9.0, [N/A]",
        "name, compute_cap, driver_version",
        "8.6",
        ", 8.6, 550.1",
        "x",
    ] {
        let resolved = listing(line);
        assert!(resolved.value.unwrap().gpus.is_empty(), "{line}");
        assert!(resolved.decision.why.ends_with(line), "{}", resolved.decision.why);
    }
}

#[test]
fn f7_a_hanging_or_absent_nvidia_smi_is_told() {
    let resolved = with("while :; do read line < /dev/zero; done");
    assert_eq!(resolved.decision.why, "GPU unknown (not needed to build): SMI gave no answer within 0.08 s");
    let request = GpuRequest { folders: Vec::new(), driver_file: "/none".into(), limit: LIMIT };
    let resolved = find_gpus(&request, &Env::of::<&str, &str>([], "/"));
    assert_eq!(resolved.decision.why, "no GPU found (not needed to build): there is no nvidia-smi");
    assert_eq!(resolved.value, Some(Gpus::default()));
}

#[test]
fn the_kernel_drivers_file_tells_the_driver() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("version");
    fs_err::write(
        &file,
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12.2\n",
    )
    .unwrap();
    let request = GpuRequest { folders: Vec::new(), driver_file: file, limit: LIMIT };
    let resolved = find_gpus(&request, &Env::of::<&str, &str>([], "/"));
    assert_eq!(resolved.decision.notes, ["driver 580.65.06, CUDA 13.0, PTX up to 9.0"]);
}

fn gpus(capability: &str, cuda: &str) -> Gpus {
    let capability = Capability::parse(capability).unwrap();
    let gpu = Gpu { name: "GPU".into(), capability };
    Gpus { gpus: vec![gpu], driver: None, cuda: CudaVersion::parse(cuda) }
}

#[test]
fn f4_an_artifact_for_another_gpu_is_predicted() {
    let warnings = predict(&gpus("8.6", "13.0"), "sm_90a".parse().unwrap(), PtxIsa::new(8, 0));
    assert_eq!(
        warnings,
        [
            "GPU: sm_90a is locked to capability 9.0, and the GPU has 8.6; PTX for an `a` architecture runs on no other"
        ]
    );
    assert_eq!(
        gpus("8.6", "12.0").notes_on(&"sm_120a".parse().unwrap()),
        [
            "sm_120a is locked to capability 12.0: it runs on no other GPU",
            "GPU: sm_120a is locked to capability 12.0, and the GPU has 8.6; PTX for an `a` architecture runs on \
                 no other",
            "the driver supports CUDA 12.0, which accepts PTX up to 8.0; PTX 8.7 would fail with \
                 CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        ]
    );
    assert!(predict(&gpus("8.6", "13.0"), "sm_86".parse().unwrap(), PtxIsa::new(7, 1)).is_empty());
}

#[test]
fn f5_unsupported_ptx_is_predicted_from_the_driver() {
    let resolved = listing("NVIDIA H200, 9.0, 550.54.15");
    let warnings = predict(&resolved.value.unwrap(), "sm_90".parse().unwrap(), PtxIsa::new(9, 0));
    assert_eq!(
        warnings,
        ["the driver supports CUDA 12.4, which accepts PTX up to 8.4; PTX 9.0 would fail with \
              CUDA_ERROR_UNSUPPORTED_PTX_VERSION"]
    );
}

#[test]
fn f12_the_drivers_cache_is_mentioned() {
    let note = |name, value| cache_note(&Env::of([(name, value)], "/"));
    assert!(note("CUDA_CACHE_PATH", "/home/shared/cache").unwrap().contains("/home/shared/cache"));
    assert!(note("CUDA_CACHE_DISABLE", "1").unwrap().contains("off"));
    assert_eq!(note("CUDA_CACHE_PATH", ""), None);
}
