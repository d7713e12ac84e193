//! Reading PTX text, to check that a build gave what was asked, and which drivers can load it.
//!
//! llc's exit status proves nothing: the architecture, leaked intrinsics and the version are judged by the PTX itself.
//! Left out: instruction semantics; only names are looked at.

pub mod build_record;
pub mod compare;
pub mod driver;
pub mod listing;
pub mod record;
pub mod scan;
pub mod table;
pub mod usage;

use std::collections::{BTreeMap, BTreeSet};

use crate::base::version::PtxIsa;
use crate::machine::arch::Arch;
use crate::report::error::{Error, Result};

crate::codes! {
    NOT_PTX = "KILN-0331", Refusal, "the artifact is not PTX",
        "The file does not start like PTX: `.version`, `.target` and `.address_size` must come before the \
         first function. Nothing was published. Check that the llc that the message names is LLVM's own.";
    WRONG_TARGET = "KILN-0332", Refusal, "the PTX is for another architecture",
        "The `.target` line is not the architecture that was asked for. A variable such as CUDA_OXIDE_TARGET \
         or a default in a file won over `--arch`, or an old file was left behind. Nothing was published. \
         Unset the variable or remove the default, and build again.";
    PTX_VERSION = "KILN-0333", Refusal, "the PTX version is too low for its architecture",
        "llc writes an old `.version` when it does not recognise the architecture, and still exits 0. No driver \
         accepts such PTX. Nothing was published.";
    LEAKED_INTRINSIC = "KILN-0334", Refusal, "llc did not lower an intrinsic",
        "The PTX declares or calls an external function with a dot in its name: an LLVM intrinsic that this llc does \
         not know and passed through. The PTX cannot be linked. A newer verified llc usually knows it. Nothing was published.";
    UNRESOLVED = "KILN-0335", Refusal, "the PTX calls functions that nothing defines",
        "The PTX declares external functions that no file defines. Names that start with __nv_ come from \
         libdevice: a kernel calls a library function such as exp or sqrt instead of the spelled PTX or a \
         polynomial. Replace the call as the message says.";
    NO_ENTRY = "KILN-0336", Refusal, "the PTX has no kernel",
        "No `.entry` is in the PTX, so nothing can be launched. The kernels were compiled away, or the wrong \
         crate was built. Check that the kernels are still used by the crate that is built.";
    CONTRACTION = "KILN-0337", Refusal, "floating-point contraction is not off",
        "An f32 or f64 operation has no rounding mode. The driver's compiler may fuse a multiplication and an \
         addition of that form, which gives other bits than the host. With contraction off every operation \
         says `.rn`. Spell the operation with `.rn`, or report the backend that wrote it.";
}

/// What was read from PTX text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ptx {
    /// The text after `.version`, where it is a version.
    pub version: Option<PtxIsa>,
    /// The first word after `.target`, as written.
    pub target: Option<String>,
    /// The number after `.address_size`.
    pub address_size: Option<u32>,
    /// Names of the kernels (`.entry`), in order of appearance.
    pub entries: Vec<String>,
    /// Names of functions and variables that are declared external or called by name, and not defined in this text.
    pub externs: BTreeSet<String>,
    /// How often each floating-point opcode occurs, such as `fma.rn.f32`.
    pub float_ops: BTreeMap<String, usize>,
}

impl Ptx {
    /// Reads PTX. Anything is accepted: what is missing stays empty, and [`check`] judges.
    pub fn parse(text: &str) -> Self {
        let text = without_comments(text);
        let mut ptx = Ptx::default();
        for line in text.lines() {
            ptx.directive(line.trim());
        }
        // Statements end with `;` or at a brace; a label or a predicate may stand in front of an opcode.
        for statement in text.split([';', '{', '}', '\n']) {
            ptx.instruction(statement.trim());
        }
        let mut defined = BTreeSet::new();
        for piece in declarations(&text) {
            match piece {
                Declared::Entry(name) => {
                    defined.insert(name.clone());
                    ptx.entries.push(name);
                }
                Declared::Extern(name) => {
                    ptx.externs.insert(name);
                }
                Declared::Defined(name) => {
                    defined.insert(name);
                }
            }
        }
        ptx.externs.retain(|name| !defined.contains(name));
        ptx
    }

    fn directive(&mut self, line: &str) {
        let mut words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
        let (Some(directive), Some(value)) = (words.next(), words.next()) else { return };
        match directive {
            ".version" if self.version.is_none() => self.version = PtxIsa::parse(value),
            ".target" if self.target.is_none() => self.target = Some(value.to_owned()),
            ".address_size" if self.address_size.is_none() => self.address_size = value.parse().ok(),
            _ => {}
        }
    }

    fn instruction(&mut self, statement: &str) {
        let mut words =
            statement.split_whitespace().filter(|word| !word.starts_with('@') && !word.ends_with(':'));
        let Some(opcode) = words.next() else { return };
        let mut parts = opcode.split('.');
        let arithmetic = parts.next().is_some_and(|name| FLOAT_OPS.contains(&name));
        if arithmetic && parts.any(|part| FLOAT_TYPES.contains(&part)) {
            *self.float_ops.entry(opcode.to_owned()).or_default() += 1;
        }
    }

    /// Opcodes of f32 and f64 arithmetic without a rounding mode, which ptxas may contract.
    pub fn contractible(&self) -> impl Iterator<Item = &str> {
        self.float_ops.keys().map(String::as_str).filter(|opcode| {
            let mut parts = opcode.split('.');
            let fusible = parts.next().is_some_and(|name| matches!(name, "add" | "sub" | "mul" | "fma"));
            let parts: Vec<&str> = parts.collect();
            let wide = parts.iter().any(|part| matches!(*part, "f32" | "f64" | "f32x2"));
            let rounded = parts.iter().any(|part| matches!(*part, "rn" | "rz" | "rm" | "rp" | "rna"));
            fusible && wide && !rounded
        })
    }
}

/// What PTX is checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expectation {
    /// The architecture that was asked for.
    pub arch: Arch,
    /// Contraction is off: every f32 and f64 operation must name its rounding.
    pub contraction_off: bool,
}

/// Refuses PTX that is not what was asked for. `name` is the file, `llc` what made it, for the messages.
///
/// # Errors
/// The first thing that is wrong, in this order: not PTX, another architecture, a version too low for it, a leaked
/// intrinsic, an unresolved function, no kernel, contraction.
pub fn check(ptx: &Ptx, expected: &Expectation, name: &str, llc: &str) -> Result<()> {
    let arch = expected.arch;
    let (Some(version), Some(target), Some(address_size)) = (ptx.version, &ptx.target, ptx.address_size)
    else {
        let what = format!("{name} is not PTX: it lacks a `.version`, `.target` or `.address_size` line");
        return Err(
            Error::new(&NOT_PTX, what).hint("build again; if it stays, run llc by hand on the .ll beside it")
        );
    };
    if *target != arch.to_string() {
        let what = format!("{name} has `.target {target}`, and {llc} was asked for {arch}");
        return Err(Error::new(&WRONG_TARGET, what)
            .hint("remove the folder of the file and build again; if it stays, another llc is needed"));
    }
    if version < arch.min_ptx() {
        let what = format!(
            "{name} has `.version {version}`, and {arch} needs at least {}: {llc} does not know {arch}",
            arch.min_ptx()
        );
        return Err(Error::new(&PTX_VERSION, what).hint("use a verified llc of a newer LLVM major"));
    }
    if address_size != 64 {
        return Err(Error::new(&NOT_PTX, format!("{name} has `.address_size {address_size}`, expected 64"))
            .hint("build again without other target settings"));
    }
    let dotted = list(ptx.externs.iter().filter(|name| name.contains('.')));
    if !dotted.is_empty() {
        let what =
            format!("{name} uses {dotted}, which is left as a function: {llc} does not know that intrinsic");
        return Err(Error::new(&LEAKED_INTRINSIC, what).hint("use a verified llc of a newer LLVM major"));
    }
    let unresolved = list(ptx.externs.iter().filter(|name| !is_of_the_driver(name)));
    if !unresolved.is_empty() {
        let error = Error::new(&UNRESOLVED, format!("{name} calls {unresolved}, which nothing defines"));
        return Err(if unresolved.contains("__nv_") {
            error.hint("spell the operation with ptx_asm! or a polynomial; libdevice is not on the llc path")
        } else {
            error.hint("define the function in the kernel crate")
        });
    }
    if ptx.entries.is_empty() {
        return Err(Error::new(&NO_ENTRY, format!("{name} has no `.entry`"))
            .hint("check that the crate has a #[kernel] and that it was built with the backend"));
    }
    let fusible = list(ptx.contractible());
    if expected.contraction_off && !fusible.is_empty() {
        let what = format!("{name} has {fusible} without a rounding mode, so ptxas may contract it");
        return Err(Error::new(&CONTRACTION, what).hint("build with contraction off (CUDA_OXIDE_NO_FMA=1)"));
    }
    Ok(())
}

/// What llc complained about on standard error, though it may have exited with 0, and what that means.
pub fn llc_complaint(stderr: &str) -> Option<String> {
    let meaning = |line: &str| {
        Some(if line.contains("is not a recognized processor") {
            "this llc does not know the architecture, and writes PTX of an old version"
        } else if line.contains("is not a recognized feature") {
            "this llc does not know the feature, and ignores it"
        } else if line.contains("Unknown command line argument") {
            "this llc has another set of options than the verified majors"
        } else if line.contains("cannot be lowered") || line.contains("Cannot select") {
            "this llc does not know the intrinsic"
        } else if line.contains("Minimum required PTX version") {
            "the PTX version that was asked for is too low for the architecture"
        } else {
            return None;
        })
    };
    stderr.lines().find_map(|line| Some(format!("{} ({})", line.trim(), meaning(line)?)))
}

const FLOAT_OPS: &[&str] = &[
    "add", "sub", "mul", "fma", "mad", "div", "sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh",
    "neg", "abs", "min", "max",
];
const FLOAT_TYPES: &[&str] = &["f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"];

/// Functions that the driver itself provides.
fn is_of_the_driver(name: &str) -> bool {
    matches!(name, "vprintf" | "__assertfail" | "malloc" | "free" | "__cudaCDP2Free")
}

enum Declared {
    Entry(String),
    Extern(String),
    Defined(String),
}

/// Functions and variables at file scope: `.visible .entry k(`, `.extern .func (.param .b32 r) f`, `.extern .shared
/// .align 16 .b8 x[]`.
fn declarations(text: &str) -> Vec<Declared> {
    let mut found = Vec::new();
    let mut words = Words { rest: text };
    let (mut external, mut depth) = (false, 0_usize);
    while let Some(word) = words.next() {
        match word {
            "{" => depth = depth.saturating_add(1),
            "}" => depth = depth.saturating_sub(1),
            ";" => external = false,
            ".extern" => external = true,
            ".entry" | ".func" => {
                let Some(name) = words.function_name() else { continue };
                let name = name.to_owned();
                found.push(match (word, external) {
                    (".entry", false) => Declared::Entry(name),
                    (_, true) => Declared::Extern(name),
                    // A prototype without a body counts as defined here: ptxas complains when it is not.
                    (_, false) => Declared::Defined(name),
                });
                external = false;
            }
            ".shared" | ".global" | ".const" if external && depth == 0 => {
                // `extern .shared` is how dynamic shared memory is spelt; it needs no definition.
                if word != ".shared"
                    && let Some(name) = words.variable_name()
                {
                    found.push(Declared::Extern(name.to_owned()));
                }
                external = false;
            }
            "call" | "call.uni" => {
                // llc 23 reports an intrinsic that it does not know, and still writes the call, without a declaration.
                if let Some(name) = words.called_name() {
                    found.push(Declared::Extern(name.to_owned()));
                }
            }
            _ => {}
        }
    }
    found
}

/// Words of PTX: punctuation stands alone.
struct Words<'a> {
    rest: &'a str,
}

impl<'a> Words<'a> {
    fn next(&mut self) -> Option<&'a str> {
        self.rest = self.rest.trim_start();
        let first = self.rest.chars().next()?;
        let is_mark = |c: char| matches!(c, '(' | ')' | '{' | '}' | '[' | ']' | ';' | ',' | '=');
        let end = if is_mark(first) {
            first.len_utf8()
        } else {
            self.rest.find(|c: char| c.is_whitespace() || is_mark(c)).unwrap_or(self.rest.len())
        };
        let (word, rest) = self.rest.split_at_checked(end)?;
        self.rest = rest;
        Some(word)
    }

    /// The name after `.func`, past a parenthesised return value and attributes.
    fn function_name(&mut self) -> Option<&'a str> {
        loop {
            match self.next()? {
                "(" => while self.next()? != ")" {},
                ";" | "{" | "}" | ")" => return None,
                word if is_name(word) => return Some(word),
                _ => {}
            }
        }
    }

    /// The name after `call`, past the return values; `None` for a call through a register.
    fn called_name(&mut self) -> Option<&'a str> {
        loop {
            match self.next()? {
                "(" => while self.next()? != ")" {},
                "," => {}
                word => return (is_name(word) && !word.starts_with('%')).then_some(word),
            }
        }
    }

    /// The name of a variable, past its alignment and type.
    fn variable_name(&mut self) -> Option<&'a str> {
        loop {
            match self.next()? {
                ";" | "{" | "}" | "(" | ")" => return None,
                word if is_name(word) => return Some(word),
                _ => {}
            }
        }
    }
}

/// Not a directive, a number or punctuation.
fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || matches!(c, '_' | '$' | '%'))
}

fn without_comments(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        let (before, slash) = rest.split_at(at);
        plain.push_str(before);
        if let Some(comment) = slash.strip_prefix("//") {
            rest = comment.find('\n').map_or("", |end| comment.split_at(end).1);
        } else if let Some(comment) = slash.strip_prefix("/*") {
            rest = comment.split_once("*/").map_or("", |(_, after)| after);
            plain.push(' ');
        } else {
            plain.push('/');
            rest = slash.split_at(1).1;
        }
    }
    plain.push_str(rest);
    plain
}

fn list(names: impl Iterator<Item = impl AsRef<str>>) -> String {
    let mut text = String::new();
    for (at, name) in names.enumerate() {
        if at > 0 {
            text.push_str(", ");
        }
        text.push_str(name.as_ref());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEAK: &str = "k.ptx uses llvm.nvvm.made.up, which is left as a function: llc-22 22.1.8 does not know that intrinsic";
    const GOOD: &str = include_str!("../../tests/fixtures/ptx/dot_product_sm_90_llc22.ptx");

    fn expect(arch: &str) -> Expectation {
        Expectation { arch: arch.parse().unwrap(), contraction_off: true }
    }

    fn refused(text: &str, arch: &str) -> (&'static str, String) {
        let error = check(&Ptx::parse(text), &expect(arch), "k.ptx", "llc-22 22.1.8").unwrap_err();
        assert_eq!(error.exit().status(), 70);
        (error.code().id, error.message().to_owned())
    }

    #[test]
    fn real_ptx_of_llc_22_is_read() {
        let ptx = Ptx::parse(GOOD);
        assert_eq!(ptx.version, Some(PtxIsa::new(7, 8)));
        assert_eq!(ptx.target.as_deref(), Some("sm_90"));
        assert_eq!(ptx.address_size, Some(64));
        assert_eq!(ptx.entries, ["k"]);
        assert!(ptx.externs.is_empty());
        let ops: Vec<_> = ptx.float_ops.iter().map(|(op, count)| format!("{op} {count}")).collect();
        assert_eq!(ops, ["add.rn.f32 1", "mul.rn.f32 1", "sub.rn.f32 1"]);
        check(&ptx, &expect("sm_90"), "k.ptx", "llc").unwrap();
    }

    #[test]
    fn f8_another_target_than_asked_is_refused() {
        assert_eq!(
            refused(GOOD, "sm_86"),
            ("KILN-0332", "k.ptx has `.target sm_90`, and llc-22 22.1.8 was asked for sm_86".to_owned())
        );
        // Never by prefix.
        assert_eq!(refused(&GOOD.replace("sm_90", "sm_90a"), "sm_90").0, "KILN-0332");
        assert_eq!(refused(GOOD, "sm_90a").0, "KILN-0332");
    }

    #[test]
    fn f1_f3_the_fallback_version_of_an_llc_that_does_not_know_the_arch_is_refused() {
        for version in ["3.2", "6.0"] {
            let text =
                GOOD.replace(".version 7.8", &format!(".version {version}")).replace("sm_90", "sm_120");
            let (code, message) = refused(&text, "sm_120");
            assert_eq!(code, "KILN-0333");
            assert_eq!(
                message,
                format!(
                    "k.ptx has `.version {version}`, and sm_120 needs at least 8.7: llc-22 22.1.8 does not know sm_120"
                )
            );
        }
    }

    #[test]
    fn a11_a_leaked_intrinsic_is_named() {
        let text = format!(
            "{GOOD}\n.extern .func  (.param .b32 func_retval0) llvm.nvvm.made.up\n(\n\t.param .b32 llvm.nvvm.made.up_param_0\n)\n;\n"
        );
        assert_eq!(refused(&text, "sm_90"), ("KILN-0334", LEAK.to_owned()));
    }

    #[test]
    fn a11_a_call_of_an_intrinsic_without_a_declaration_is_named() {
        // What llc 23.1.4 writes, beside its error.
        let call = "\tcall.uni (retval0), llvm.nvvm.made.up, (param0);\n\tret;";
        assert_eq!(refused(&GOOD.replace("\tret;", call), "sm_90"), ("KILN-0334", LEAK.to_owned()));
        let fine = "\tcall %rd1, (param0), proto;\n\tcall.uni helper;\n\tret;";
        let defined = format!("{}\n.func helper()\n{{\nret;\n}}\n", GOOD.replace("\tret;", fine));
        check(&Ptx::parse(&defined), &expect("sm_90"), "k.ptx", "llc").unwrap();
        let unknown = GOOD.replace("\tret;", "\tcall.uni __nv_expf, (a);\n");
        assert_eq!(refused(&unknown, "sm_90").0, "KILN-0335");
    }

    #[test]
    fn a11_libdevice_calls_are_named_and_driver_functions_are_fine() {
        let declare = |name: &str| {
            format!(
                "{GOOD}\n.extern .func (.param .align 16 .b32 func_retval0) {name}\n(\n\t.param .b32 p\n)\n;\n"
            )
        };
        assert_eq!(
            refused(&declare("__nv_expf"), "sm_90"),
            ("KILN-0335", "k.ptx calls __nv_expf, which nothing defines".to_owned())
        );
        check(&Ptx::parse(&declare("vprintf")), &expect("sm_90"), "k.ptx", "llc").unwrap();
        let shared = format!("{GOOD}\n.extern .shared .align 16 .b8 dynamic[];\n");
        check(&Ptx::parse(&shared), &expect("sm_90"), "k.ptx", "llc").unwrap();
        let defined = format!("{}\n.visible .func __nv_expf()\n{{\nret;\n}}\n", declare("__nv_expf"));
        check(&Ptx::parse(&defined), &expect("sm_90"), "k.ptx", "llc").unwrap();
    }

    #[test]
    fn f1_f9_complaints_of_llc_are_explained() {
        let complaint = |text: &str| llc_complaint(&format!("first\n{text}\nlast\n"));
        assert_eq!(
            complaint("'SM_86' is not a recognized processor for this target (ignoring processor)").unwrap(),
            "'SM_86' is not a recognized processor for this target (ignoring processor) (this llc does not know the \
             architecture, and writes PTX of an old version)"
        );
        assert!(
            complaint("llc: Unknown command line argument '-fp-contract=off'.")
                .unwrap()
                .contains("set of options")
        );
        assert!(
            complaint("'+ptx999' is not a recognized feature for this target (ignoring feature)").is_some()
        );
        assert!(complaint("call to unknown intrinsic 'x' cannot be lowered by the NVPTX backend").is_some());
        assert_eq!(complaint("warning: something"), None);
    }

    #[test]
    fn no_entry_and_not_ptx_are_refused() {
        let header = ".version 7.8\n.target sm_90\n.address_size 64\n";
        assert_eq!(refused(header, "sm_90").0, "KILN-0336");
        assert_eq!(refused(&format!("{header}// .visible .entry k()\n"), "sm_90").0, "KILN-0336");
        for text in ["", "\0\u{1}", "; ModuleID = 'k'\ntarget triple = \"nvptx64-nvidia-cuda\"\n", "<html>"] {
            assert_eq!(refused(text, "sm_90").0, "KILN-0331");
        }
        assert_eq!(refused(&GOOD.replace("size 64", "size 32"), "sm_90").0, "KILN-0331");
    }

    #[test]
    fn operations_without_a_rounding_mode_are_refused_when_contraction_is_off() {
        let text = GOOD.replace("mul.rn.f32", "@%p1 mul.f32").replace("add.rn.f32", "$L1: add.ftz.f32");
        assert_eq!(
            refused(&text, "sm_90"),
            (
                "KILN-0337",
                "k.ptx has add.ftz.f32, mul.f32 without a rounding mode, so ptxas may contract it".to_owned()
            )
        );
        let on = Expectation { contraction_off: false, ..expect("sm_90") };
        check(&Ptx::parse(&text), &on, "k.ptx", "llc").unwrap();
        // A spelled fma is fine; so are operations that cannot be fused.
        let fine = GOOD.replace("mul.rn.f32", "fma.rn.f32").replace("add.rn.f32", "max.f32");
        check(&Ptx::parse(&fine), &expect("sm_90"), "k.ptx", "llc").unwrap();
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*|([.](extern|func|entry|global|target|version)|[a-z(){};,/*\"\n .0-9])*") {
            let ptx = Ptx::parse(&text);
            let _ = check(&ptx, &expect("sm_90"), "k.ptx", "llc");
        }
    }
}
