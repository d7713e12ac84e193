//! `ptx` and `gate` end to end, on the synthetic upstream of [`support`]; and what the sources of the kernels must hold. No network,
//! no GPU, no LLVM.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use support::{World, finished, llvm_tool};

/// A world that is set up, with kernel sources and a record of sm_86 and sm_90.
fn recorded() -> World {
    let world = World::new();
    fs::write(world.path("work/kernels/device/kernel.rs"), "// a kernel\n").unwrap();
    world.setup();
    world.run(&["ptx", "bless", "--arch", "sm_86", "--arch", "sm_90"]).exits(0);
    world
}

fn table(world: &World) -> String {
    fs::read_to_string(world.path("work/kernels/ptx-table.toml")).unwrap()
}

/// Every file below `folder` and its content.
fn content(folder: &Path) -> BTreeMap<std::path::PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_symlink() {
                found
                    .insert(path.clone(), fs::read_link(path).unwrap().into_os_string().into_encoded_bytes());
            } else if path.is_dir() {
                folders.push(path);
            } else {
                found.insert(path.clone(), fs::read(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn f10_bless_records_and_check_compares_in_every_direction() {
    let world = recorded();
    let text = fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    assert!(
        text.contains("\n[kernels.ptx.sm_86.llvm-22]\nkernel = \"") && text.contains("\nsource-sha256 = \""),
        "{text}"
    );
    assert!(table(&world).contains("[entries.sm_90.llvm-22.kernel]\nregisters = 12\n"), "{}", table(&world));
    let check = world.run(&["ptx", "check"]).exits(0);
    assert_eq!(
        check.stdout,
        "sources: as recorded\nsm_86 llvm-22: 1 entries as recorded\nsm_90 llvm-22: 1 entries as recorded\n"
    );
    let again = world.run(&["ptx", "bless"]).exits(0);
    assert_eq!(again.stdout, "nothing changed: the record is of these sources and this PTX\n");

    // Other PTX from the same llc version: a new entry, and another instruction.
    let other = llvm_tool("22.1.8").replace("add.rn.f32 \t%r5", "sub.rn.f32 \t%r5");
    let other = other.replace("\nPTX\n", "\n.visible .entry second()\n{\n\tret;\n}\nPTX\n");
    world.script("bin/llc-22", &other);
    let run = world.run(&["ptx", "check", "--arch", "sm_90"]).exits(70).says("error[KILN-0150]");
    for line in [
        "sm_90 llvm-22: kernel: the PTX is another one: digest ",
        "sm_90 llvm-22: kernel: add.rn.f32 0, below the table's 1",
        "sm_90 llvm-22: kernel: sub.rn.f32 1, above the table's 0",
        "sm_90 llvm-22: second: new, PROVENANCE has no digest of it",
        "sm_90 llvm-22: second: new, the table does not have it",
        "hint: if the change is meant, run: cargo xtask ptx bless",
    ] {
        assert!(run.stderr.contains(line), "{line}\n{}", run.stderr);
    }
    assert_eq!(run.stdout, "sources: as recorded\n");
    world.run(&["ptx", "bless"]).exits(0);
    world.run(&["ptx", "check"]).exits(0);
    world.lay_llvm("22.1.8");
    world.run(&["ptx", "check"]).exits(70).says("second: gone, PROVENANCE has its digest");
}

#[test]
fn without_a_backend_a_stale_record_is_still_noticed() {
    let world = recorded();
    fs::remove_dir_all(world.path("store")).unwrap();
    let run = world.run(&["ptx", "check"]).exits(0);
    assert!(run.stdout.contains("PTX: not compared, since nothing can be built"), "{}", run.stdout);
    assert_eq!(world.run(&["ptx", "check", "--sources"]).exits(0).stdout, "sources: as recorded\n");
    fs::write(world.path("work/kernels/device/kernel.rs"), "// another kernel\n").unwrap();
    world
        .run(&["ptx", "check", "--sources"])
        .exits(70)
        .says("error[KILN-0356]")
        .says("cargo xtask ptx bless");
    world.run(&["ptx", "check"]).exits(70).says("error[KILN-0356]");
}

#[test]
fn a_tampered_backend_is_a_refusal_and_no_missing_one() {
    let world = recorded();
    fs::write(world.backend(), "another library").unwrap();
    world.run(&["ptx", "check"]).exits(70).says("error[KILN-0911]");
    let run = world.run(&["gate", "toolchain/doctor"]).exits(1);
    assert!(
        run.stdout.starts_with("RED      toolchain/doctor") && run.stdout.contains("KILN-0911"),
        "{}",
        run.stdout
    );
}

#[test]
fn a_record_whose_two_halves_differ_is_refused() {
    let world = recorded();
    let text = table(&world).replace("sm_90.llvm-22.kernel", "sm_90.llvm-22.other");
    fs::write(world.path("work/kernels/ptx-table.toml"), text).unwrap();
    world
        .run(&["ptx", "check", "--sources"])
        .exits(70)
        .says("error[KILN-0154]")
        .says("sm_90 llvm-22: the entry kernel");
    fs::write(world.path("work/kernels/ptx-table.toml"), "schema = 1\nx = 1\n").unwrap();
    world.run(&["ptx", "check", "--sources"]).exits(1).says("error[KILN-0362]");
}

#[test]
fn f10_a_spill_needs_a_dated_reason() {
    let world = recorded();
    fs::write(world.path("cuda/spill"), "8").unwrap();
    world.run(&["ptx", "check"]).exits(70).says("kernel: spill-stores 8, above the table's 0");
    let before = (table(&world), fs::read(world.path("work/PROVENANCE")).unwrap());
    let run = world.run(&["ptx", "bless"]).exits(1).says("error[KILN-0151]");
    run.says("sm_86 llvm-22 kernel: spill-stores = 8, spill-loads = 8").says("--reason TEXT");
    assert_eq!((table(&world), fs::read(world.path("work/PROVENANCE")).unwrap()), before);

    world.run(&["ptx", "bless", "--reason", "it is a test"]).exits(0);
    assert_eq!(table(&world).matches(": it is a test\"\n").count(), 2, "{}", table(&world));
    world.run(&["ptx", "check"]).exits(0);
    // The reason stays as long as the number does.
    world.run(&["ptx", "bless"]).exits(0);
    fs::write(world.path("cuda/spill"), "16").unwrap();
    world.run(&["ptx", "bless"]).exits(1).says("error[KILN-0151]");
    fs::remove_file(world.path("cuda/spill")).unwrap();
    world.run(&["ptx", "bless"]).exits(0);
    assert!(!table(&world).contains("reason"), "{}", table(&world));
}

#[test]
fn scan_prints_all_rows_or_none() {
    let world = recorded();
    let scan = world.run(&["ptx", "scan", "--arch", "sm_86"]).exits(0);
    let lines: Vec<_> = scan.stdout.lines().collect();
    assert_eq!(lines[0], "sm_86 llvm-22");
    assert!(
        lines[1]
            .starts_with("entry   digest        regs  shared  stack  spill st  spill ld  local  instr  mix"),
        "{}",
        scan.stdout
    );
    assert!(
        lines[2].starts_with("kernel  ")
            && lines[2].ends_with(
                "12    0       0      0         0         -      3      add.rn.f32 1, mul.rn.f32 1, ret 1"
            ),
        "{}",
        scan.stdout
    );
    assert_eq!(lines[3], "registers, memory and spills by ptxas V13.0.88");
    // Of files, without building; as JSON.
    let mut command = world.command(&["ptx", "scan", "--json", "target/device/sm_86"]);
    let run = finished(command.output().unwrap()).exits(0);
    let json: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(json["schema"], "kiln.ptx-scan/1");
    assert_eq!(json["scans"][0]["entries"][0]["registers"], 12);

    world.script("cuda/bin/ptxas", "#!/bin/sh\n[ $1 = --version ] && echo 'release 13.0, V13.0.88' && exit 0\necho 'ptxas fatal: no' >&2; exit 255\n");
    let failed = world
        .run(&["ptx", "scan", "--arch", "sm_86"])
        .exits(1)
        .says("error[KILN-0351]")
        .says("ptxas fatal: no");
    assert_eq!(failed.stdout, "");
}

#[test]
fn another_ptxas_is_said_and_its_numbers_are_not_compared() {
    let world = recorded();
    fs::write(world.path("cuda/spill"), "8").unwrap();
    let ptxas = fs::read_to_string(world.path("cuda/bin/ptxas")).unwrap().replace("V13.0.88", "V13.1.1");
    world.script("cuda/bin/ptxas", &ptxas);
    world.run(&["ptx", "check"]).exits(0).says("ptx: warning: ptxas is V13.1.1, the table is of V13.0.88");
}

#[test]
fn every_recorded_major_is_recorded_anew_or_nothing_is() {
    let world = recorded();
    let provenance = world.path("work/PROVENANCE");
    let both = fs::read_to_string(&provenance).unwrap().replace("verified = [22]", "verified = [22, 21]");
    fs::write(&provenance, both).unwrap();
    world.lay_llvm("21.1.8");
    world.lay_llvm("22.1.8");
    let build = world.run(&["build", "--arch", "sm_86", "--llc", "21"]).exits(0);
    let ptx = build.stdout.lines().nth(1).unwrap().split_whitespace().nth(1).unwrap().to_owned();
    assert!(fs::read_to_string(ptx).unwrap().contains("// LLVM 21.1.8"));
    let path = world.path("bin/llc-21").display().to_string();
    let doctor = world.run(&["doctor", "--llc", &path]).exits(0);
    assert!(doctor.stdout.contains("--llc names it, and LLVM 21 is verified"), "{}", doctor.stdout);

    world.run(&["ptx", "bless", "--llc", "21"]).exits(0);
    assert!(
        table(&world).contains("entries.sm_90.llvm-21.kernel")
            && table(&world).contains("entries.sm_90.llvm-22.kernel")
    );
    world.run(&["ptx", "check"]).exits(0);
    world.run(&["ptx", "check", "--llc", "21"]).exits(0);
    fs::remove_file(world.path("bin/llc-21")).unwrap();
    fs::remove_file(world.path("bin/opt-21")).unwrap();
    world.run(&["ptx", "bless"]).exits(1).says("no llc of LLVM 21");
}

/// What the synthetic libNVVM is told to write.
const ROUNDED: &str = "\tmul.rn.f32 \t%f1, %f2, %f3;";

#[test]
fn libnvvm_makes_the_ptx_and_the_program_holds_it() {
    let world = World::new();
    world.lay_libnvvm(ROUNDED);
    world.verify_libnvvm("\"13.0\"");
    world.setup();
    // It needs no llc.
    for name in ["llc", "llc-22", "opt", "opt-22"] {
        fs::remove_file(world.path(&format!("bin/{name}"))).unwrap();
    }
    let doctor = world.run(&["doctor", "--llc", "libnvvm", "--arch", "sm_90"]).exits(0);
    let library = world.path("cuda/nvvm/lib64/libnvvm.so");
    let chosen = format!("ok   libnvvm      {} (libNVVM 2.0 of CUDA 13.0, NVVM IR 2.0)\n", library.display());
    assert!(doctor.stdout.contains(&chosen), "{}", doctor.stdout);
    assert!(
        doctor.stdout.contains("not looked for: --llc libnvvm makes PTX with libNVVM"),
        "{}",
        doctor.stdout
    );

    let build = world.run(&["build", "--arch", "sm_90", "--llc", "libnvvm"]).exits(0);
    let program = world.path("work/target/device/sm_90-libnvvm/release/kiln");
    let mut lines = build.stdout.lines();
    assert_eq!(lines.next().unwrap(), format!("sm_90  {}", program.display()));
    let ptx = lines.next().unwrap();
    assert!(ptx.ends_with("/kiln.ptx (.version 9.0, .target sm_90, 1 entries)"), "{ptx}");
    let ptx = fs::read_to_string(ptx.split_whitespace().nth(1).unwrap()).unwrap();
    let first = ptx.lines().next().unwrap();
    assert!(
        first.starts_with("// By libNVVM 2.0 of CUDA 13.0, sha256:")
            && first.contains(", -arch=compute_90 -fma=0 -prec-div=1 -prec-sqrt=1 -ftz=0, of IR sha256:"),
        "{first}"
    );
    assert!(ptx.contains(".visible .entry kernel()") && !ptx.contains("helper"), "{ptx}");
    assert!(fs::read_to_string(&program).unwrap().contains(&ptx));
    assert!(!world.path("work/target/device/sm_90").exists(), "not where llc's is");

    // Nothing is compiled twice, and a changed file is made again.
    let calls = || {
        let text = fs::read_to_string(world.path("work/target/device/sm_90-libnvvm/calls.txt")).unwrap();
        text.lines().count()
    };
    assert_eq!(calls(), 2);
    world.run(&["build", "--arch", "sm_90", "--llc", "libnvvm"]).exits(0);
    assert_eq!(calls(), 3);
    let path = build.stdout.lines().nth(1).unwrap().split_whitespace().nth(1).unwrap();
    fs::write(path, ptx.replace("mul.rn", "mul.rz")).unwrap();
    world.run(&["build", "--arch", "sm_90", "--llc", "libnvvm"]).exits(0).says("it is made again");
    assert_eq!((calls(), fs::read_to_string(path).unwrap() == ptx), (5, true));
    world.run(&["verify"]).exits(0);
    world.lay_card();
    let gates = world.run(&["gate", "--llc", "libnvvm", "--arch", "sm_90"]).exits(0);
    assert!(
        gates.stdout.contains("skipped  toolchain/refuses-other-llc: --llc libnvvm is given"),
        "{}",
        gates.stdout
    );
    assert!(gates.stdout.contains("skipped  toolchain/ptx-record: PROVENANCE has no "), "{}", gates.stdout);
    assert!(gates.stdout.contains("green    toolchain/ptx-reproducible"), "{}", gates.stdout);
    assert!(gates.stdout.contains("green    device/kquant"), "{}", gates.stdout);
    assert!(
        gates.stdout.contains("skipped  toolchain/bundle-offline: --llc libnvvm is given"),
        "{}",
        gates.stdout
    );
    assert!(gates.stdout.contains(" red=0 skipped=3 "), "{}", gates.stdout);

    // The kernels are checked as llc's are, and the library is held to the architecture.
    world
        .run(&["build", "--arch", "sm_120", "--llc", "libnvvm"])
        .exits(1)
        .says("error[KILN-0395]")
        .says("-arch=compute_120 is an unsupported option");
    world.lay_libnvvm("\tmul.f32 \t%f1, %f2, %f3;");
    let run = world.run(&["build", "--arch", "sm_90", "--llc", "libnvvm"]).exits(70);
    run.says("error[KILN-0337]").says("kiln.ptx has mul.f32 without a rounding mode");
    world.run(&["setup", "--llc", "libnvvm"]).exits(1).says("error[KILN-0397]");
}

#[test]
fn libnvvm_that_is_missing_unverified_or_refuses_is_named() {
    let world = World::new();
    world.setup();
    let build = |code: i32, words: &[&str]| {
        let mut run = world.run(&["build", "--arch", "sm_90", "--llc", "libnvvm"]).exits(code);
        for word in words {
            run = run.says(word);
        }
    };
    build(1, &["error[KILN-0391]", "has no libNVVM"]);
    // Without --llc it is no problem.
    let doctor = world.run(&["doctor"]).exits(0);
    assert!(doctor.stdout.contains("-    libnvvm      none\n"), "{}", doctor.stdout);
    world.lay_libnvvm(ROUNDED);
    build(70, &["error[KILN-0392]", "PROVENANCE verifies that of CUDA none"]);
    world.verify_libnvvm("\"12.9\"");
    build(70, &["error[KILN-0392]", "libNVVM 2.0 of CUDA 13.0", "PROVENANCE verifies that of CUDA 12.9"]);
    world.edit("work/PROVENANCE", "\"12.9\"", "\"13.0\"");
    build(0, &[]);
    let options = "refuses the IR of kiln with -arch=compute_90 -fma=0 -prec-div=1 -prec-sqrt=1 -ftz=0";
    world.lay_libnvvm("\tadd.rn.f32 \t%f1, %f2, %f3;");
    world.script("cuda/bin/ptxas", "#!/bin/sh\n[ $1 = --version ] && echo 'release 13.0, V13.0.88' && exit 0\necho 'ptxas fatal: no' >&2; exit 255\n");
    build(1, &["error[KILN-0351]", "ptxas fatal: no"]);
    build(1, &["error[KILN-0351]"]);
    fs::remove_file(world.path("cuda/bin/ptxas")).unwrap();
    build(0, &[]);
    world.lay_libnvvm("refuse");
    build(1, &["error[KILN-0394]", options, "caused by: NVVM_ERROR_INVALID_IR: error: no such thing\n"]);
    fs::write(world.path("cuda/nvvm/lib64/libnvvm.so"), "").unwrap();
    build(1, &["error[KILN-0393]", "cannot be opened"]);
    world.run(&["doctor"]).exits(0);
}

#[test]
fn everything_that_is_verified_is_recorded() {
    let world = recorded();
    world.lay_libnvvm(ROUNDED);
    world.verify_libnvvm("\"13.0\"");
    let run = world.run(&["ptx", "check", "--llc", "libnvvm"]).exits(1).says("error[KILN-0357]");
    run.says("PROVENANCE has no [kernels.ptx.sm_86.libnvvm-13.0]");
    world.run(&["ptx", "bless"]).exits(0);
    let text = fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    assert!(text.contains("\n[kernels.ptx.sm_90.\"libnvvm-13.0\"]\nkernel = \""), "{text}");
    assert!(table(&world).contains("\n[entries.sm_90.\"libnvvm-13.0\".kernel]\n"), "{}", table(&world));
    world.run(&["ptx", "check"]).exits(0);
    let check = world.run(&["ptx", "check", "--llc", "libnvvm"]).exits(0);
    assert!(check.stdout.contains("sm_90 libnvvm-13.0: 1 entries as recorded\n"), "{}", check.stdout);
    // Only the one in use is compared.
    world.lay_libnvvm("\tadd.rn.f32 \t%f1, %f2, %f3;");
    world.run(&["ptx", "check"]).exits(0);
    world
        .run(&["ptx", "check", "--llc", "libnvvm"])
        .exits(70)
        .says("kernel: add.rn.f32 1, above the table's 0");
    // All majors of llc beside it, of which each build picks one.
    world.lay_libnvvm(ROUNDED);
    for version in ["21.1.8", "23.1.4", "22.1.8"] {
        world.lay_llvm(version);
    }
    world.edit("work/PROVENANCE", "verified = [22]", "verified = [21, 22, 23]");
    world
        .run(&["ptx", "check", "--llc", "23"])
        .exits(1)
        .says("PROVENANCE has no [kernels.ptx.sm_86.llvm-23]");
    world.run(&["ptx", "bless"]).exits(0);
    let text = fs::read_to_string(world.path("work/PROVENANCE")).unwrap();
    for arch in ["sm_86", "sm_90"] {
        for compiler in ["\"libnvvm-13.0\"", "llvm-21", "llvm-22", "llvm-23"] {
            assert!(text.contains(&format!("\n[kernels.ptx.{arch}.{compiler}]\nkernel = \"")), "{text}");
            assert!(
                table(&world).contains(&format!("\n[entries.{arch}.{compiler}.kernel]\n")),
                "{}",
                table(&world)
            );
        }
    }
    for llc in ["21", "22", "23", "libnvvm"] {
        let check = world.run(&["ptx", "check", "--llc", llc]).exits(0);
        assert_eq!(check.stdout.matches(llc).count(), 2, "{}", check.stdout);
    }
    // Without --llc it is the preferred one, as before.
    let build = world.run(&["build", "--arch", "sm_86"]).exits(0);
    let ptx = build.stdout.lines().nth(1).unwrap().split_whitespace().nth(1).unwrap();
    assert!(fs::read_to_string(ptx).unwrap().starts_with("// LLVM 22.1.8\n"));
    // A major that is not verified any more drops out.
    world.edit("work/PROVENANCE", "verified = [21, 22, 23]", "verified = [22, 23]");
    world.run(&["ptx", "bless"]).exits(0);
    assert!(!table(&world).contains("llvm-21") && table(&world).contains("llvm-23"), "{}", table(&world));
    // Another release than the recorded one may not take its name.
    world.edit("work/PROVENANCE", "verified = [\"13.0\"]", "verified = [\"12.9\", \"13.0\"]");
    world.run(&["ptx", "bless"]).exits(1).says("error[KILN-0156]");
    world.edit("work/PROVENANCE", "verified = [\"12.9\", \"13.0\"]", "verified = []");
    world.run(&["ptx", "bless"]).exits(0);
    assert!(!table(&world).contains("libnvvm"), "{}", table(&world));
}

#[test]
fn a5_the_flag_refuses_an_unverified_major_and_wins_over_the_variable() {
    let world = World::new();
    world.setup();
    world
        .run(&["build", "--arch", "sm_86", "--llc", "23"])
        .exits(70)
        .says("error[KILN-0313]")
        .says("PROVENANCE verifies 22");
    world.run(&["doctor", "--llc", "23"]).exits(70);
    let mut command = world.command(&["build", "--arch", "sm_86", "--llc", "22"]);
    command.env("CUDA_OXIDE_LLC", world.path("none"));
    finished(command.output().unwrap()).exits(0);
    world.run(&["build", "--arch", "sm_86", "--llc", "bin/none"]).exits(1).says("--llc is \"bin/none\"");
}

#[test]
fn diff_names_the_class_of_what_differs() {
    let world = World::new();
    let text = |body: &str| {
        format!(
            ".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry k()\n{{\n{body}\tret;\n}}\n.visible .entry same()\n{{\n\tret;\n}}\n"
        )
    };
    let write = |name: &str, text: &str| {
        fs::create_dir_all(world.path(&format!("work/{name}"))).unwrap();
        fs::write(world.path(&format!("work/{name}/k.ptx")), text).unwrap();
    };
    write("a", &text("\tadd.s32 \t%r1, %r2, 1;\n\tmul.rn.f32 \t%f1, %f2, %f3;\n"));
    write("order", &text("\tmul.rn.f32 \t%f1, %f2, %f3;\n\tadd.s32 \t%r1, %r2, 1;\n"));
    write(
        "fused",
        &text("\tadd.s32 \t%r1, %r2, 1;\n\tfma.rn.f32 \t%f1, %f2, %f3, %f4;\n").replace("same", "renamed"),
    );
    let same = world.run(&["ptx", "diff", "a", "a/k.ptx"]).exits(0);
    assert_eq!(
        same.stdout,
        "k: identical\nsame: identical\n2 entries: 2 identical, 0 reordered only, 0 differ, 0 only in A, 0 only in B\n"
    );
    let order = world.run(&["ptx", "diff", "a", "order"]).exits(1);
    assert_eq!(
        order.stdout,
        "k: reordered only\nsame: identical\n2 entries: 1 identical, 1 reordered only, 0 differ, 0 only in A, 0 only in B\n"
    );
    let fused = world.run(&["ptx", "diff", "a", "fused"]).exits(1);
    assert_eq!(
        fused.stdout,
        "k: differs: fma.rn.f32 0 -> 1; mul.rn.f32 1 -> 0\nrenamed: only in B\nsame: only in A\n3 entries: 0 identical, 0 \
         reordered only, 1 differ, 1 only in A, 1 only in B\n"
    );
    let json: serde_json::Value =
        serde_json::from_str(&world.run(&["ptx", "diff", "a", "fused", "--json"]).exits(1).stdout).unwrap();
    assert_eq!(json["entries"]["k"]["verdict"], "differs");
    world.run(&["ptx", "diff", "a", "none"]).exits(1).says("error[KILN-0353]");
}

#[test]
fn gates_without_a_backend_and_a_card_are_skipped_by_name() {
    let world = World::new();
    let run = world.run(&["gate"]).exits(0);
    let gates = run.stdout.lines().filter(|line| line.starts_with("skipped  ")).count();
    assert!(
        run.stdout.contains("skipped  toolchain/ptx-reproducible: no backend is set up: "),
        "{}",
        run.stdout
    );
    assert!(
        run.stdout.contains("run: cargo xtask setup && cargo xtask gate toolchain/ptx-reproducible\n"),
        "{}",
        run.stdout
    );
    for gate in ["selftest", "kquant", "cpu-bits", "graph", "batch", "e2e"] {
        let line = format!("skipped  device/{gate}: no card here");
        assert!(run.stdout.contains(&line), "{line}\n{}", run.stdout);
    }
    assert!(run.stdout.contains("run: target/device/sm_90/release/kiln gate kquant\n"), "{}", run.stdout);
    assert!(
        run.stdout.contains("run: target/device/sm_90/release/kiln selftest --device cuda\n"),
        "{}",
        run.stdout
    );
    let last = run.stdout.lines().last().unwrap();
    assert!(last.starts_with(&format!("DONE total={gates} red=0 skipped={gates} wall=")), "{last}");
    assert!(!world.path("store").exists() && !world.path("work/target").exists());

    let strict = world.run(&["gate", "--require-all", "--json", "doctor"]).exits(1);
    let json: serde_json::Value = serde_json::from_str(&strict.stdout).unwrap();
    assert_eq!(
        (&json["schema"], &json["red"], &json["skipped"]),
        (&"kiln.gate/1".into(), &1.into(), &0.into())
    );
    assert_eq!(json["gates"][0]["outcome"], "red");
    assert!(strict.stderr.contains("\nDONE total=1 red=1 skipped=0 wall="), "{}", strict.stderr);
}

#[test]
fn gates_in_a_fresh_checkout_beside_a_store_that_is_set_up_are_skipped_by_name() {
    let world = World::new();
    world.setup();
    fs::remove_file(world.path("work/.cargo/cuda-oxide.toml")).unwrap();
    fs::remove_file(world.path("work/upstream")).unwrap();
    let run = world.run(&["gate", "toolchain"]).exits(0);
    assert!(
        run.stdout.contains("skipped  toolchain/doctor: no backend is set up: ")
            && run.stdout.contains("/work has no .cargo/cuda-oxide.toml and no upstream"),
        "{}",
        run.stdout
    );
    assert!(!run.stdout.contains("RED"), "{}", run.stdout);
    world.run(&["doctor"]).exits(1);
}

#[test]
fn a_filter_or_defect_that_matches_nothing_fails() {
    let world = World::new();
    world.run(&["gate", "no-such-gate"]).exits(1).says("error[KILN-0140]").says("toolchain/doctor, ");
    world.run(&["gate", "--seed-defect", "doctor"]).exits(1).says("error[KILN-0140]");
    // The option's former name.
    world.run(&["gate", "--plant", "doctor"]).exits(1).says("error[KILN-0140]");
    world.run(&["gate", "--plant", "toolchain/doctor", "toolchain"]).exits(1);
    world.run(&["gate", "--arch", "SM_86"]).exits(1).says("error[KILN-0321]");
}

#[test]
fn f13_every_gate_is_green_and_red_with_its_defect_and_changes_nothing_of_the_user_s() {
    let world = recorded();
    world.lay_card();
    let list = world.run(&["gate", "--list", "--json"]).exits(0);
    let list: serde_json::Value = serde_json::from_str(&list.stdout).unwrap();
    let gates = list["gates"].as_array().unwrap().iter();
    let mut names: Vec<String> = gates.map(|gate| gate["name"].as_str().unwrap().to_owned()).collect();
    assert!(names.len() >= 19, "{names:?}");

    let before = (content(&world.path("store")), content(&world.path("work")));
    let temporary = world.path("temporary");
    fs::create_dir(&temporary).unwrap();
    let gate = |arguments: &[&str]| {
        let mut command = world.command(&[&["gate"], arguments].concat());
        command.env("TMPDIR", &temporary);
        finished(command.output().unwrap())
    };
    let run = gate(&[]).exits(0);
    if !support::has_network_namespaces() {
        support::skipped("f13", "no network namespace can be made here (unshare -rn)");
        assert!(run.stdout.contains("skipped  toolchain/bundle-offline: "), "{}", run.stdout);
        names.retain(|name| name != "toolchain/bundle-offline");
    }
    let green = run.stdout.lines().filter(|line| line.starts_with("green    ")).count();
    assert_eq!(green, names.len(), "{}", run.stdout);
    for name in &names {
        let run = gate(&["--seed-defect", name]).exits(1);
        assert!(run.stdout.starts_with(&format!("RED      {name} (")), "{}", run.stdout);
        assert!(run.stdout.contains("\nDONE total=1 red=1 skipped=0 wall="), "{}", run.stdout);
    }
    // Only what a build writes and lock files have changed, and the scratch copies are gone.
    let without = |content: &BTreeMap<std::path::PathBuf, Vec<u8>>, folder: &str| {
        let all = content.iter().filter(|(path, _)| !path.starts_with(world.path(folder)));
        all.map(|(path, bytes)| (path.clone(), bytes.clone())).collect::<BTreeMap<_, _>>()
    };
    let differ = |before, after: BTreeMap<std::path::PathBuf, Vec<u8>>, folder| {
        let (before, after) = (without(before, folder), without(&after, folder));
        let paths = before.keys().chain(after.keys()).filter(|path| before.get(*path) != after.get(*path));
        paths.cloned().collect::<Vec<_>>()
    };
    let nothing = Vec::<std::path::PathBuf>::new();
    assert_eq!(differ(&before.0, content(&world.path("store")), "store/locks"), nothing);
    assert_eq!(differ(&before.1, content(&world.path("work")), "work/target"), nothing);
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
}

#[test]
fn device_gates_run_a_copied_binary_where_nothing_can_be_built() {
    let world = recorded();
    world.lay_card();
    fs::remove_dir_all(world.path("store")).unwrap();
    let run = world.run(&["gate", "device/"]).exits(0).says("is used as it is: nothing can be built here");
    assert!(run.stdout.contains("green    device/selftest"), "{}", run.stdout);
    assert!(run.stdout.contains("NVIDIA H200 (capability 9.0): 5 compared, 0 failed"), "{}", run.stdout);
    assert!(run.stdout.contains("green    device/graph"), "{}", run.stdout);
    assert!(run.stdout.contains("NVIDIA H200 (capability 9.0): 5 compared (0.0 s)\n"), "{}", run.stdout);
    assert!(run.stdout.contains("\nDONE total=9 red=0 skipped=0 wall="), "{}", run.stdout);
    fs::remove_dir_all(world.path("work/target")).unwrap();
    let run = world.run(&["gate", "device/"]).exits(0);
    assert!(run.stdout.contains("skipped  device/selftest: there is no "), "{}", run.stdout);
    // An architecture that the card does not run.
    let run = world.run(&["gate", "device/", "--arch", "sm_120"]).exits(0);
    assert!(run.stdout.contains("runs none of the architectures that were named"), "{}", run.stdout);
}

/// The code of each line, without comments.
fn code(source: &str) -> String {
    source.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

/// How many `#[launch_bounds]` a source has, and those whose number of threads no const assertion in it compares with.
/// The attribute takes a literal, and launches take a constant: nothing else keeps the two together.
fn unasserted_launch_bounds(source: &str) -> (usize, Vec<String>) {
    let code = code(source);
    // Conditions alone: a message may name any number.
    let conditions: Vec<&str> = code
        .split("const _: () =")
        .skip(1)
        .filter_map(|rest| rest.split(';').next()?.trim_start().strip_prefix("assert!("))
        .filter_map(|rest| rest.split('"').next())
        .collect();
    let asserted = |literal: &str| {
        let compared = conditions.iter().flat_map(|condition| condition.split("== ").skip(1));
        let mut numbers = compared.map(|rest| rest.split(|c: char| !c.is_alphanumeric()).next());
        literal.parse::<u32>().is_ok() && numbers.any(|number| number == Some(literal))
    };
    let bounds: Vec<&str> = code
        .split("#[launch_bounds(")
        .skip(1)
        .map(|rest| rest.split([',', ')']).next().unwrap_or("").trim())
        .collect();
    let missing = bounds.iter().filter(|literal| !asserted(literal)).map(|literal| literal.to_string());
    (bounds.len(), missing.collect())
}

#[test]
fn every_launch_bound_is_asserted_in_its_file() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/device/src");
    let (mut files, mut all) = (0, 0);
    for (path, bytes) in content(&sources) {
        let (bounds, missing) = unasserted_launch_bounds(std::str::from_utf8(&bytes).unwrap());
        assert!(
            missing.is_empty(),
            "{}: #[launch_bounds] of {missing:?}, expected in the same file, for each, a `const _: () = assert!(C == N);` \
             with the constant C that launches take",
            path.display()
        );
        files += usize::from(bounds > 0);
        all += bounds;
    }
    assert!(files > 10 && all >= files, "{all} launch bounds in {files} files of {}", sources.display());
}

#[test]
fn a_launch_bound_without_an_assertion_is_found() {
    let kernel = "#[kernel]\n#[launch_bounds(256, 2)]\npub fn kiln_one() {}\n";
    let asserted = |assertion: &str| unasserted_launch_bounds(&format!("{assertion}\n{kernel}")).1.is_empty();
    assert!(asserted("const _: () = assert!(THREADS == 256, \"the literal\");"));
    assert!(asserted("const _: () = assert!(SIDE == 64 && CREW == 256);"));
    assert!(asserted("const _: () =\n    assert!(CREW == 256 && SIDE == 64, \"a long line\");"));
    for other in [
        "",
        "const _: () = assert!(THREADS == 512, \"the literal\");",
        "const _: () = assert!(THREADS == 2560);",
        "const _: () = assert!(THREADS <= 256);",
        "const _: () = assert!(THREADS == 512, \"== 256\");",
        "// const _: () = assert!(THREADS == 256);",
        "/// `const _: () = assert!(THREADS == 256)`",
        "const THREADS: usize = 256;",
    ] {
        assert!(!asserted(other), "{other}");
    }
    // Of two, the one that is missing; and what is no literal.
    let two =
        format!("const _: () = assert!(A == 256);\n{kernel}#[launch_bounds(512)]\n#[launch_bounds(CREW)]\n");
    assert_eq!(unasserted_launch_bounds(&two), (3, vec!["512".to_owned(), "CREW".to_owned()]));
    // In words, or taken out.
    assert_eq!(unasserted_launch_bounds("//! `#[launch_bounds(256)]`\n"), (0, Vec::new()));
}
