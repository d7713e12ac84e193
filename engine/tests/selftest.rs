//! `kiln selftest` as a user runs it: exit codes, streams, last lines.

use std::process::{Command, Output};

fn kiln(args: &[&str]) -> (Option<i32>, String, String) {
    let output: Output =
        Command::new(env!("CARGO_BIN_EXE_kiln")).args(args).output().expect("the kiln binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("kiln writes UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn success_is_zero_and_the_verdict_is_the_last_line() {
    let (code, stdout, stderr) = kiln(&["selftest"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let last = stdout.lines().last().expect("a verdict");
    assert!(last.starts_with("selftest: ") && last.ends_with(" passed, 0 failed"), "{last}");
}

#[test]
fn a_planted_defect_is_one() {
    let (code, stdout, _) = kiln(&["selftest", "--plant", "lane-order"]);
    assert_eq!(code, Some(1));
    let last = stdout.lines().last().expect("a verdict");
    assert!(last.starts_with("selftest: ") && !last.ends_with(" 0 failed"), "{last}");
}

#[test]
fn a_device_that_this_binary_cannot_have_is_one_and_named() {
    let (code, stdout, stderr) = kiln(&["selftest", "--device", "cuda:1"]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""));
    assert_eq!(stderr, "error: this kiln was built without `cuda` devices; it has: cpu\n");
}
