//! The built command as its user meets it: exit codes, streams, signals, split files, and what is refused.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kiln_engine::gguf::Gguf;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn kiln() -> Command {
    Command::new(env!("CARGO_BIN_EXE_kiln"))
}

fn output(arguments: &[&str]) -> Output {
    kiln().args(arguments).stdin(Stdio::null()).output().expect("kiln starts")
}

/// What is on stderr of a command that must fail with exit code 1 and print nothing else.
fn refused(arguments: &[&str]) -> String {
    let output = output(arguments);
    let text = String::from_utf8(output.stderr).expect("text");
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(1), &b""[..]),
        "{arguments:?}: {text}"
    );
    text
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

#[test]
fn a_split_file_is_the_whole_file() {
    let whole = Gguf::open(&fixture("llama.gguf")).expect("a good file");
    let split = Gguf::open(&fixture("split-00001-of-00003.gguf")).expect("good parts");
    assert_eq!(whole.tensors().keys().collect::<Vec<_>>(), split.tensors().keys().collect::<Vec<_>>());
    for (name, tensor) in whole.tensors() {
        assert_eq!(whole.data(tensor), split.data(&split.tensors()[name]), "{name}");
    }
    let text = |name: &str| {
        let file = fixture(name);
        output(&["run", "-m", path(&file), "-p", "hello", "-n", "20", "--temp", "0", "-t", "1"]).stdout
    };
    assert!(!text("llama.gguf").is_empty());
    assert_eq!(text("llama.gguf"), text("split-00001-of-00003.gguf"));
}

#[test]
fn parts_of_a_split_file_that_do_not_fit_together_are_named() {
    let error = refused(&["run", "-p", "x", "-m", path(&fixture("split-00002-of-00003.gguf"))]);
    assert!(error.contains("must end in -00001-of-00003.gguf (give the first part)"), "{error}");

    let folder = tempfile::tempdir().expect("a folder");
    let place = |part: usize, from: usize| {
        let to = folder.path().join(format!("m-{part:05}-of-00003.gguf"));
        std::fs::copy(fixture(&format!("split-{from:05}-of-00003.gguf")), &to).expect("a copy");
        to
    };
    let first = place(1, 1);
    let missing = refused(&["inspect", "-m", path(&first)]);
    assert!(missing.contains("cannot open") && missing.contains("m-00002-of-00003.gguf"), "{missing}");
    place(2, 3);
    place(3, 3);
    let other = refused(&["inspect", "-m", path(&first)]);
    assert!(
        other.contains("m-00002-of-00003.gguf says that it is part 3 of 3, expected part 2 of 3"),
        "{other}"
    );
    // Another part under the first one's name.
    place(2, 2);
    place(1, 2);
    let not_first = refused(&["inspect", "-m", path(&first)]);
    assert!(
        not_first.contains("m-00001-of-00003.gguf says that it is part 2 of 3, expected part 1 of 3"),
        "{not_first}"
    );
}

#[test]
fn odd_requests_are_answered_or_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let prompt = folder.path().join("prompt.txt");
    std::fs::write(&prompt, b"Once \xff\xfe upon").expect("written");
    let error = refused(&["run", "-f", path(&prompt)]);
    assert!(error.contains("prompt.txt") && error.contains("UTF-8"), "{error}");

    let types = fixture("types.gguf");
    let error = refused(&["run", "-p", "x", "-m", path(&types)]);
    assert!(error.contains("types.gguf") && error.contains("none"), "{error}");

    // A context of 0 is that of the model's training; more threads than processors are cut to what is there.
    for extra in [&["-c", "0"][..], &["-t", "1000"]] {
        let arguments = [&["run", "-n", "4", "--seed", "1"], extra].concat();
        let run = output(&arguments);
        assert!(run.status.success() && run.stdout.starts_with(b"Once upon a time"), "{run:?}");
    }
    let error = refused(&["run", "-n", "4", "-c", "2000000000"]);
    assert!(error.contains("a context of 2000000000 in batches of 64, expected at most"), "{error}");
}

/// Runs a command that must succeed, with this on its standard input.
fn piped(arguments: &[&str], input: &str) -> String {
    let mut child =
        kiln().args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("kiln starts");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("written");
    let output = child.wait_with_output().expect("an end");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn text_to_tokenize_comes_from_standard_input_too() {
    let expected = "[0, 424, 588, 261, 383]\n";
    assert_eq!(piped(&["tokenize", "--ids"], "Once upon a time"), expected);
    assert_eq!(piped(&["tokenize", "--ids", "--stdin"], "Once upon a time"), expected);
    assert_eq!(piped(&["tokenize", "--ids", "-p", "Once upon a time"], "another"), expected);
}

#[test]
fn a_conversation_is_written_by_a_template_on_a_given_date() {
    let folder = tempfile::tempdir().expect("a folder");
    let template = folder.path().join("t.jinja");
    let source =
        "{{ strftime_now('%d %b %Y') }}|{{ messages[0].content }}|{{ enable_thinking }}|{{ tools | tojson }}";
    std::fs::write(&template, source).expect("written");
    let tools = folder.path().join("tools.json");
    std::fs::write(&tools, r#"[{"name": "<f>", "a": 1}]"#).expect("written");
    let base = ["apply-template", "--chat-template-file", path(&template)];
    let extra = ["--date", "2026-03-05", "--tools", path(&tools), "--no-thinking"];
    let conversation = r#"{"messages": [{"role": "user", "content": "Hi"}]}"#;
    let text = piped(&[&base[..], &extra].concat(), conversation);
    assert_eq!(text, r#"05 Mar 2026|Hi|False|[{"name": "<f>", "a": 1}]"#);
    let kwargs =
        ["--date", "2026-03-05", "--chat-template-kwargs", r#"{"enable_thinking": 3, "tools": null}"#];
    assert_eq!(piped(&[&base[..], &kwargs].concat(), conversation), "05 Mar 2026|Hi|3|null");
    let error = refused(&[&base[..], &["--chat-template-kwargs", "[1]"]].concat());
    assert!(error.contains("the conversation"), "{error}");
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut child = kiln()
        .args(["run", "--ignore-eos", "-n", "400", "--seed", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kiln starts");
    let mut some = [0; 8];
    child.stdout.take().expect("a pipe").read_exact(&mut some).expect("text");
    let output = child.wait_with_output().expect("an end");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Sends the signal of Ctrl-C.
#[cfg(unix)]
fn interrupt(child: &std::process::Child) {
    use rustix::process::{Pid, Signal, kill_process};
    kill_process(Pid::from_child(child), Signal::INT).expect("the signal is sent");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_run_with_the_text_so_far() {
    let model = fixture("llama.gguf");
    let mut child = kiln()
        .args(["run", "-m", path(&model), "-p", "Once", "-t", "1"])
        // Far more than can be made before the signal comes.
        .args(["-c", "100000", "-n", "-1", "--ignore-eos"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kiln starts");
    let mut text = vec![0; 16];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut text).expect("text");
    interrupt(&child);
    let output = child.wait_with_output().expect("an end");
    text.extend(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{errors}");
    assert!(text.starts_with(b"Once") && text.ends_with(b"\n"), "{:?}", String::from_utf8_lossy(&text));
    assert!(errors.contains("(stopped)"), "{errors}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_benchmark() {
    let mut child = kiln()
        .args(["bench", "-p", "0", "-n", "64", "-r", "100000", "-t", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kiln starts");
    // What it loaded is said first.
    child.stderr.as_mut().expect("a pipe").read_exact(&mut [0; 8]).expect("text");
    interrupt(&child);
    let output = child.wait_with_output().expect("an end");
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
}
