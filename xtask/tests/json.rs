//! `--json` on every verb: one document on standard output, whatever happens.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use clap::CommandFactory as _;
use serde_json::Value;
use support::{REVISION, World};

/// Every verb that does something, as `ptx check`.
fn verbs() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for verb in xtask::cmd::cli::Cli::command().get_subcommands() {
        let inner: Vec<_> =
            verb.get_subcommands().map(|inner| format!("{} {}", verb.get_name(), inner.get_name())).collect();
        found.extend(if inner.is_empty() { vec![verb.get_name().to_owned()] } else { inner });
    }
    found
}

/// The document that a run with `--json` printed.
#[track_caller]
fn document(world: &World, line: &[&str], status: i32) -> Value {
    let run = world.run(&[line, &["--json"]].concat()).exits(status);
    assert!(run.stdout.ends_with("\n"), "{line:?}");
    serde_json::from_str(&run.stdout).unwrap_or_else(|error| panic!("{line:?}: {error}:\n{}", run.stdout))
}

#[test]
fn every_verb_prints_one_document_that_the_documentation_names() {
    let world = World::new();
    fs::write(world.path("work/kernels/device/kernel.rs"), "// a kernel\n").unwrap();
    let upstream = world.path("upstream").display().to_string();
    let lines: &[(&str, &str, &[&str])] = &[
        ("setup", "kiln.setup/1", &["setup", "--offline", "--dry-run", "--source", &upstream]),
        ("setup", "kiln.setup/1", &["setup", "--offline", "--source", &upstream]),
        ("setup", "kiln.setup/1", &["setup", "--offline"]),
        ("build", "kiln.build/1", &["build", "--arch", "sm_86"]),
        ("doctor", "kiln.doctor/1", &["doctor"]),
        ("gate", "kiln.gate/1", &["gate", "toolchain/doctor"]),
        ("gate", "kiln.gate-list/1", &["gate", "--list"]),
        ("ptx bless", "kiln.ptx-bless/1", &["ptx", "bless", "--arch", "sm_86"]),
        ("ptx check", "kiln.ptx-check/1", &["ptx", "check"]),
        ("ptx check", "kiln.ptx-check/1", &["ptx", "check", "--sources"]),
        ("ptx scan", "kiln.ptx-scan/1", &["ptx", "scan", "--arch", "sm_86"]),
        ("ptx diff", "kiln.ptx-diff/1", &["ptx", "diff", "target/device/sm_86", "target/device/sm_86"]),
        ("model", "kiln.model/1", &["model"]),
        ("explain", "kiln.explain/1", &["explain"]),
        ("explain", "kiln.explain/1", &["explain", "911"]),
        ("verify", "kiln.verify/1", &["verify"]),
        ("bundle", "kiln.bundle-report/1", &["bundle", "--offline", "bundle.tar.gz"]),
        ("pin", "kiln.pin/1", &["pin", REVISION, "--source", &upstream]),
        ("attest", "", &["attest"]),
        ("store", "kiln.store/1", &["store"]),
        ("gc", "kiln.gc/1", &["gc"]),
        ("completions", "kiln.completions/1", &["completions", "zsh"]),
        ("man", "kiln.man/1", &["man", "pages"]),
    ];
    let mut documents = BTreeMap::new();
    for (verb, schema, line) in lines {
        let document = document(&world, line, 0);
        match *schema {
            // In-toto's own form.
            "" => assert_eq!(document["_type"], "https://in-toto.io/Statement/v1"),
            schema => assert_eq!(document["schema"], schema, "{verb}"),
        }
        documents.insert(line.join(" "), document);
    }
    let seen: BTreeSet<_> = lines.iter().map(|(verb, ..)| (*verb).to_owned()).collect();
    assert_eq!(seen, verbs(), "a verb is not tried here");

    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let pages: String = ["reference", "hermetic", "gates", "ptx"]
        .map(|page| fs::read_to_string(format!("{folder}/{page}.md")).unwrap())
        .concat();
    for (_, schema, _) in lines {
        assert!(pages.contains(schema), "{schema} is not documented");
    }

    // What the verbs are for is in it.
    let of = |line: &str| &documents[line];
    let steps = |line: &str| of(line)["steps"].as_array().unwrap().len();
    assert_eq!(steps(&format!("setup --offline --dry-run --source {upstream}")), 3);
    assert_eq!(of(&format!("setup --offline --dry-run --source {upstream}"))["backend"], Value::Null);
    assert_eq!(steps(&format!("setup --offline --source {upstream}")), 3);
    assert_eq!(steps("setup --offline"), 0);
    assert_eq!(of("setup --offline")["backend"], world.backend().display().to_string());
    let built = &of("build --arch sm_86")["builds"][0];
    assert_eq!((&built["arch"], &built["ptx"][0]["entries"]), (&"sm_86".into(), &1.into()));
    assert_eq!(of("ptx bless --arch sm_86")["written"], true);
    assert_eq!(of("ptx check")["compared"][0]["entries"], 1);
    assert!(of("ptx check --sources")["not_compared"].is_string());
    assert_eq!(of("explain 911")["codes"][0]["code"], "KILN-0911");
    assert!(of("man pages")["pages"].as_array().unwrap().len() > 15);
    assert!(of("completions zsh")["text"].as_str().unwrap().contains("#compdef xtask"));
}

#[test]
fn the_reference_lists_every_verb_with_its_options() {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference.md")).unwrap();
    let everywhere = ["store", "toolchain", "llc", "lock-timeout", "quiet", "json", "help", "version"];
    let mut rows = 0;
    let root = xtask::cmd::cli::Cli::command();
    for verb in verbs() {
        let names = verb.split(' ');
        let command = names.fold(&root, |command, name| command.find_subcommand(name).unwrap());
        let row =
            page.lines().find(|line| line.starts_with(&format!("| `{verb}` | ")) && !line.contains("kiln."));
        let row = row.unwrap_or_else(|| panic!("{verb} has no row"));
        rows += 1;
        for option in command.get_arguments().filter_map(|argument| argument.get_long()) {
            let listed = row.contains(&format!("`--{option}")) || everywhere.contains(&option);
            assert!(listed, "the row of {verb} lacks --{option}");
        }
        for named in row.split("`--").skip(1) {
            let named = named.split([' ', '`']).next().unwrap();
            let is = command.get_arguments().any(|argument| argument.get_long() == Some(named));
            assert!(is, "{verb} has no --{named}");
        }
        let json = command.get_arguments().any(|argument| argument.get_long() == Some("json"));
        assert!(json, "{verb} has no --json");
    }
    assert!(rows > 15);
}

/// Asserts that `document` is an error, and returns its code.
#[track_caller]
fn error(document: &Value, status: i32) -> String {
    let mut keys: Vec<_> = document.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["causes", "code", "exit", "hint", "message", "ok", "schema", "title"], "{document}");
    assert_eq!(document["schema"], "kiln.error/1");
    assert_eq!((&document["ok"], &document["exit"]), (&false.into(), &status.into()), "{document}");
    assert!(!document["message"].as_str().unwrap().is_empty());
    document["code"].as_str().unwrap().to_owned()
}

#[test]
fn every_error_is_a_document_too() {
    let world = World::new();
    fs::write(world.path("file"), "").unwrap();
    for verb in verbs() {
        let line: Vec<&str> = verb.split(' ').collect();
        let unknown = document(&world, &[&line, &["--no-such-option"][..]].concat(), 1);
        assert_eq!(error(&unknown, 1), "KILN-0105", "{verb}");
    }
    assert_eq!(error(&document(&world, &[], 1), 1), "KILN-0105");
    assert_eq!(error(&document(&world, &["no-such-verb"], 1), 1), "KILN-0105");

    let file = world.path("file").display().to_string();
    let lines: &[(&str, i32, &[&str])] = &[
        ("KILN-0101", 2, &["setup", "--bundle", "none.tar.gz"]),
        ("KILN-0321", 1, &["build", "--arch", "SM_86"]),
        ("KILN-0389", 1, &["build", "--arch", "sm_86"]),
        ("KILN-0140", 1, &["gate", "no-such-gate"]),
        ("KILN-0357", 1, &["ptx", "check"]),
        ("KILN-0160", 1, &["model", "no-such-model"]),
        ("KILN-0120", 1, &["explain", "9999"]),
        ("KILN-0389", 1, &["bundle", "--offline", "b.tar.gz"]),
        ("KILN-0910", 1, &["attest"]),
        ("KILN-0261", 1, &["pin", "main", "--source", "."]),
        ("KILN-0904", 1, &["store", "--store", "~/x"]),
        ("KILN-0904", 1, &["gc", "--store", "~/x"]),
        ("KILN-0101", 2, &["man", &file]),
    ];
    for (code, status, line) in lines {
        let document = document(&world, line, *status);
        assert_eq!(error(&document, *status), *code, "{line:?}: {document}");
    }
}
