use super::*;
use crate::machine::probe::tests::script;
use proptest::prelude::*;

fn hint(text: &str) -> String {
    let gpus = [Capability { major: 9, minor: 0 }];
    let error = parse(text, &gpus).unwrap_err();
    assert_eq!(error.code().id, "KILN-0321", "{text}");
    error.hint_text().unwrap().to_owned()
}

#[test]
fn f1_misspelt_architectures_are_refused_with_a_suggestion() {
    for text in
        ["SM_86", "86", "8.6", "compute_86", "sm86", "sm_86 ", "sm_086", "sm_8\u{ff16}", " sm_86", "sm-86"]
    {
        assert_eq!(hint(text), "did you mean --arch sm_86?", "{text}");
    }
    assert_eq!(hint("12.0"), "did you mean --arch sm_120?");
    assert_eq!(hint("SM_90A"), "did you mean --arch sm_90a?");
    assert_eq!(hint(""), "name one, such as --arch sm_90");
    assert_eq!(hint("sm_86,sm_90"), "repeat the flag: --arch sm_86 --arch sm_90");
    assert_eq!(hint("8.6;90a"), "repeat the flag: --arch sm_86 --arch sm_90a");
    assert_eq!(hint("native"), "--arch sm_90, for the GPU of this machine");
    assert_eq!(hint("gfx1100"), "name one such as --arch sm_90");
    for text in ["sm_", "sm_a", "sm_86aa", "sm_86A", "sm_+86", "sm_99999999999", "sm_86\n", "sm_86\0"] {
        assert!(parse(text, &[]).is_err(), "{text:?}");
    }
    assert!(parse("native", &[]).unwrap_err().hint_text().unwrap().contains("doctor"));
    assert_eq!(
        parse("SM_86", &[]).unwrap_err().message(),
        "\"SM_86\" is not an architecture: expected sm_<number>, optionally with `a` or `f`"
    );
}

#[test]
fn f2_a_and_f_exist_only_where_the_table_says() {
    for text in ["sm_75a", "sm_80a", "sm_86a", "sm_89a", "sm_90f", "sm_86f"] {
        let error = parse(text, &[]).unwrap_err();
        assert_eq!(error.code().id, "KILN-0322", "{text}");
        assert_eq!(error.hint_text().unwrap(), format!("--arch {}", &text[..text.len() - 1]));
    }
    for text in [
        "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a", "sm_101a", "sm_110a", "sm_100f", "sm_120f",
        "sm_86",
    ] {
        assert_eq!(parse(text, &[]).unwrap().to_string(), text);
    }
    assert_eq!(parse("sm_100f", &[]).unwrap().min_ptx(), PtxIsa::new(8, 8));
    assert_eq!(parse("sm_85", &[]).unwrap_err().hint_text().unwrap(), "the nearest are sm_86, sm_87, sm_88");
    assert!(parse("sm_35", &[]).unwrap_err().hint_text().unwrap().contains("from sm_50 on"));
}

/// An llc that answers `-mcpu=help` on standard error, as LLVM does.
fn cpus(names: &[&str]) -> LlcCpus {
    let folder = tempfile::tempdir().unwrap();
    let lines: String =
        names.iter().map(|name| format!("  {name:<7} - Select the {name} processor.\n")).collect();
    let text = format!(
        "Available CPUs for this target:\n\n{lines}\nAvailable features for this target:\n\n  ptx32 - Use PTX version 32.\n  sm_20x - no.\n"
    );
    let llc = script(
        folder.path(),
        "llc",
        &format!("[ \"$*\" = '-mtriple=nvptx64-nvidia-cuda -mcpu=help' ] || exit 1\nprintf %s '{text}' >&2"),
    );
    let mut cpus = LlcCpus::ask(&llc, &Env::of::<&str, &str>([], "/")).unwrap();
    cpus.llc = "/usr/bin/llc-14".into();
    cpus
}

#[test]
fn f3_an_architecture_newer_than_llc_is_refused() {
    let old = cpus(&["sm_20", "sm_80", "sm_86"]);
    let error = parse("sm_120", &[]).unwrap().require_known_to(&old).unwrap_err();
    assert_eq!(error.message(), "sm_120 is not known to /usr/bin/llc-14, whose newest architecture is sm_86");
    assert_eq!(error.exit().status(), 1);
    parse("sm_86", &[]).unwrap().require_known_to(&old).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let silent = script(folder.path(), "llc", ":");
    assert_eq!(LlcCpus::ask(&silent, &Env::of::<&str, &str>([], "/")).unwrap_err().code().id, "KILN-0324");
}

#[test]
fn f4_locked_architectures_run_on_one_capability_or_family() {
    let runs = |arch: &str, gpu: &str| {
        parse(arch, &[]).unwrap().runs_on(Capability::parse(gpu).unwrap()).err().unwrap_or("runs".into())
    };
    assert_eq!(runs("sm_86", "8.6"), "runs");
    assert_eq!(runs("sm_86", "12.0"), "runs");
    assert_eq!(runs("sm_90", "8.6"), "sm_90 needs capability 9.0 or later, and the GPU has 8.6");
    assert_eq!(
        runs("sm_90a", "8.6"),
        "sm_90a is locked to capability 9.0, and the GPU has 8.6; PTX for an `a` architecture runs on no other"
    );
    assert_eq!(runs("sm_90a", "9.0"), "runs");
    assert!(runs("sm_90a", "10.0").contains("locked to capability 9.0"));
    assert_eq!(runs("sm_100f", "10.3"), "runs");
    assert!(runs("sm_103f", "10.0").contains("its own family"));
    assert!(runs("sm_100f", "12.0").contains("its own family"));
    assert_eq!(runs("sm_101a", "11.0"), "runs");
    assert_eq!(
        parse("sm_90a", &[]).unwrap().lock_note().unwrap(),
        "sm_90a is locked to capability 9.0: it runs on no other GPU"
    );
    assert_eq!(parse("sm_90", &[]).unwrap().lock_note(), None);
}

#[test]
fn f11_the_renamed_pair_is_explained() {
    let newer = cpus(&["sm_110", "sm_110a", "sm_120"]);
    let older = cpus(&["sm_101", "sm_101a", "sm_120"]);
    for (arch, cpus, other) in [("sm_101a", &newer, "sm_110a"), ("sm_110a", &older, "sm_101a")] {
        let error = parse(arch, &[]).unwrap().require_known_to(cpus).unwrap_err();
        assert_eq!(error.hint_text().unwrap(), format!("--arch {other}, for the same chip"));
        assert_eq!(error.causes(), [pair_note()]);
        assert_eq!(error.exit().status(), 1);
    }
}

#[test]
fn capabilities_are_digits_dot_digits() {
    assert_eq!(Capability::parse("12.0").unwrap().arch().unwrap().to_string(), "sm_120");
    for bad in ["", "8", "8.", ".6", "8.6\n", "a.b", "[N/A]", "8.6.1", "+8.6", "99999.1"] {
        assert_eq!(Capability::parse(bad), None, "{bad}");
    }
    assert_eq!(Capability::parse("9.9").unwrap().arch(), None);
}

proptest! {
    #[test]
    fn whatever_is_accepted_prints_as_it_was_written(text in "\\PC*|sm_[0-9]{1,4}[af]?") {
        if let Ok(arch) = parse(&text, &[]) {
            prop_assert_eq!(arch.to_string(), text);
        }
    }
}
