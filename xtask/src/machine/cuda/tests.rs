use super::*;
use crate::machine::probe::tests::script;

struct World {
    folder: tempfile::TempDir,
    variables: Vec<(&'static str, OsString)>,
    request: CudaRequest,
}

impl World {
    fn new() -> Self {
        let request = CudaRequest {
            laid: None,
            settings: BTreeMap::new(),
            roots: Vec::new(),
            libraries: Vec::new(),
            llvm_parents: Vec::new(),
        };
        World { folder: tempfile::tempdir().unwrap(), variables: Vec::new(), request }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.at(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, text).unwrap();
        path
    }

    /// A toolkit with header and stub.
    fn toolkit(&self, name: &str, version: u32) -> PathBuf {
        self.file(&format!("{name}/include/cuda.h"), &format!("/* x */\n#define CUDA_VERSION {version}\n"));
        self.file(&format!("{name}/lib64/stubs/libcuda.so"), "");
        self.at(name)
    }

    fn ptxas(&self, folder: &str, release: &str) -> PathBuf {
        let body = format!(
            "echo 'ptxas: NVIDIA (R) Ptx optimizing assembler'\necho 'Cuda compilation tools, release {release}, V{release}.88'"
        );
        script(self.folder.path(), &format!("{folder}/ptxas"), &body)
    }

    fn env(&self) -> Env {
        Env::of(self.variables.clone(), self.folder.path())
    }

    fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        self.variables.push((name, value.into()));
    }

    fn find(&self) -> Resolved<Toolkit> {
        find_toolkit(&self.request, &self.env())
    }

    fn problem(&self) -> (&'static str, String) {
        let error = self.find().require().unwrap_err();
        let root = self.folder.path().display().to_string();
        assert!(error.hint_text().is_some());
        (error.code().id, error.to_string().replace(&root, "/t"))
    }
}

#[test]
fn a13_a_toolkit_named_only_in_the_config_file_is_found() {
    let mut world = World::new();
    let root = world.toolkit("cuda-13", 13000);
    world.request.settings.insert("CUDA_HOME".into(), root.display().to_string());
    let resolved = world.find();
    assert_eq!(resolved.require().unwrap().version.to_string(), "13.0");
    assert_eq!(resolved.decision.candidates[0].from, "CUDA_HOME in .cargo/cuda-oxide.toml");
}

#[test]
fn a13_cuda_home_is_enough_for_every_part_without_path() {
    let mut world = World::new();
    let root = world.toolkit("cuda", 12040);
    world.ptxas("cuda/bin", "12.4");
    world.set("CUDA_HOME", "cuda");
    let resolved = world.find();
    let toolkit = resolved.require().unwrap();
    assert_eq!((&toolkit.root, &toolkit.link), (&root, &root.join("lib64/stubs")));
    assert_eq!(toolkit.version, CudaVersion { major: 12, minor: 4 });
    let ptxas = find_ptxas(Some(toolkit), &world.env());
    assert_eq!(
        ptxas.decision.chosen.unwrap(),
        format!("{} (V12.4.88, accepts PTX up to 8.4)", root.join("bin/ptxas").display())
    );
}

#[test]
fn a_variable_that_leads_nowhere_is_not_skipped() {
    let mut world = World::new();
    let good = world.toolkit("good", 13000);
    world.request.roots = vec![good.clone()];
    world.set("CUDA_HOME", &good);
    world.set("CUDA_TOOLKIT_PATH", world.at("none"));
    assert_eq!(
        world.problem(),
        ("KILN-0342", "CUDA_TOOLKIT_PATH is /t/none, which is not a folder".to_owned())
    );
    world.set("CUDA_TOOLKIT_PATH", "");
    assert_eq!(world.find().require().unwrap().root, good);
    fs_err::create_dir_all(world.at("none")).unwrap();
    world.toolkit("none/cuda", 13000);
    world.set("CUDA_TOOLKIT_PATH", "none");
    assert_eq!(
        world.problem().1,
        "CUDA_TOOLKIT_PATH is /t/none, which has no include/cuda.h; did you mean /t/none/cuda?"
    );
}

#[test]
fn redistributable_layouts_and_roots_from_path_are_found() {
    let mut world = World::new();
    let target = format!("redist/targets/{}", TARGETS[0]);
    world.file(&format!("{target}/include/cuda.h"), "#define CUDA_VERSION 13020\n");
    world.file(&format!("{target}/lib/stubs/libcuda.so"), "");
    world.ptxas("redist/bin", "13.2");
    world.set("PATH", world.at("redist/bin"));
    world.request.roots = vec![world.at("usual")];
    let resolved = world.find();
    let toolkit = resolved.require().unwrap();
    assert_eq!(toolkit.version.to_string(), "13.2");
    assert_eq!(toolkit.link, fs_err::canonicalize(world.at(&format!("{target}/lib/stubs"))).unwrap());
    assert_eq!(resolved.decision.candidates[0].from, "ptxas on PATH");
    assert_eq!(
        resolved.decision.candidates[1].verdict,
        Verdict::NotTried("an earlier candidate qualifies".into())
    );
}

#[test]
fn every_rejected_root_says_why() {
    let mut world = World::new();
    world.request.roots = vec![world.at("none"), world.at("bare"), world.at("odd"), world.at("stubless")];
    fs_err::create_dir_all(world.at("bare")).unwrap();
    world.file("odd/include/cuda.h", "");
    world.file("stubless/include/cuda.h", "#define CUDA_VERSION 13000\n");
    assert_eq!(
            world.problem(),
            (
                "KILN-0341",
                "no CUDA toolkit with cuda.h and a libcuda.so to link with was found\n  \
                 caused by: /t/none is not a folder\n  \
                 caused by: /t/bare has no include/cuda.h\n  \
                 caused by: /t/odd has an include/cuda.h without a CUDA_VERSION\n  \
                 caused by: /t/stubless has no stub of libcuda.so to link with (lib64/stubs), and the system has no \
                 libcuda.so"
                    .to_owned()
            )
        );
    // The driver's own library, or a folder that the linker searches, will do.
    let library = world.file("system/libcuda.so", "");
    world.request.libraries = vec![world.at("system")];
    assert_eq!(Some(world.find().require().unwrap().link.as_path()), library.parent());
    world.request.libraries.clear();
    world.set("LIBRARY_PATH", "system:");
    assert_eq!(Some(world.find().require().unwrap().link.as_path()), library.parent());
}

#[test]
fn f6_the_toolkits_ptxas_comes_before_an_older_one_on_path() {
    let mut world = World::new();
    let root = world.toolkit("cuda-13", 13000);
    let new = world.ptxas("cuda-13/bin", "13.0");
    let old = world.ptxas("old", "11.5");
    world.set("PATH", world.at("old"));
    world.set("CUDA_HOME", &root);
    let resolved = find_ptxas(world.find().value.as_ref(), &world.env());
    let ptxas = resolved.value.unwrap();
    assert_eq!((ptxas.path, ptxas.full.as_str()), (new.clone(), "V13.0.88"));
    assert_eq!(resolved.decision.candidates[1].what, old.display().to_string());
    assert_eq!(
        resolved.decision.candidates[1].verdict,
        Verdict::Rejected(format!("V11.5.88, accepts PTX up to 7.5; {} comes first", new.display()))
    );
    let none = find_ptxas(None, &Env::of::<&str, &str>([], "/"));
    assert!(none.value.is_none() && none.decision.is_good());
}

#[test]
fn libclang_is_taken_from_the_variable_or_the_newest_llvm() {
    let mut world = World::new();
    world.file("lib/llvm-9/lib/libclang.so", "");
    world.file("lib/llvm-22/lib/libclang-cpp.so.22", "");
    world.file("lib/llvm-22/lib/libclang-22.so.1", "");
    world.file("lib/llvm-22/lib/libclang.so", "");
    world.file("lib/llvm-22/lib/clang/22/include/stddef.h", "");
    world.file("lib/llvm-23/lib/libclang.so.23", "");
    world.file("lib/llvm-100/lib/other.so", "");
    world.request.llvm_parents = vec![world.at("lib")];
    let find = |world: &World| find_libclang(&world.request, &world.env());
    let resolved = find(&world);
    assert_eq!(resolved.require().unwrap().file, world.at("lib/llvm-22/lib/libclang.so"));
    assert!(matches!(resolved.decision.candidates[0].verdict, Verdict::Rejected(_)));
    assert!(resolved.decision.notes.is_empty());
    for value in ["lib/llvm-9/lib", "lib/llvm-9/lib/libclang.so"] {
        world.set("LIBCLANG_PATH", value);
        let resolved = find(&world);
        assert_eq!(resolved.require().unwrap().folder, world.at("lib/llvm-9/lib"));
        assert_eq!(resolved.decision.notes.len(), 1);
    }
    world.set("LIBCLANG_PATH", "lib/llvm-100/lib");
    assert_eq!(find(&world).require().unwrap_err().code().id, "KILN-0344");
    let world = World::new();
    assert_eq!(find(&world).require().unwrap_err().code().id, "KILN-0343");
}
