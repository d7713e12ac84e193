//! What the pinned backend's NVVM IR lacks, added to its text before libNVVM reads it.
//!
//! - A kernel with launch bounds has no `!"kernel"` annotation (upstream writes one for kernels without bounds alone),
//!   so that libNVVM would take it for a function and write no entry.
//! - Helpers are visible, so that libNVVM would keep each of them beside its inlined copies, under a mangled name that
//!   differs between checkouts. The llc road has the same from the carried patches.

use std::collections::BTreeSet;

use crate::report::error::{Error, Result};

crate::codes! {
    UNEXPECTED = "KILN-0396", Refusal, "the backend's NVVM IR has an unexpected form",
        "Before libNVVM reads the backend's IR, kernels are annotated as such and helpers made internal. The IR lists no \
         kernels, or has no place for an annotation: it is of another backend than the pinned one.";
}

/// The IR with every function that `@llvm.used` names annotated as a kernel, and every other one internal.
///
/// # Errors
/// There is no `@llvm.used`, or a kernel has no annotation to extend ([`UNEXPECTED`]).
pub fn complete(ir: &str) -> Result<String> {
    let kernels = kernels(ir);
    if kernels.is_empty() {
        return Err(unexpected("@llvm.used names no kernel".to_owned()));
    }
    let mut annotated: BTreeSet<&str> = ir
        .lines()
        .filter(|line| line.contains(KERNEL))
        .filter_map(annotation)
        .map(|(_, name, _)| name)
        .collect();
    let mut out = String::with_capacity(ir.len() + ir.len() / 16);
    for line in ir.lines() {
        if let Some(rest) = line.strip_prefix("define ") {
            let is_kernel = symbol(rest).is_some_and(|(name, _)| kernels.contains(name));
            out.push_str(if is_kernel || rest.starts_with("internal ") {
                "define "
            } else {
                "define internal "
            });
            out.push_str(rest);
        } else if let Some((before, name, after)) = annotation(line)
            && kernels.contains(name)
            && annotated.insert(name)
        {
            out.push_str(&format!("{before}@{name}{KERNEL}{after}"));
        } else {
            out.push_str(line);
        }
        out.push('\n');
    }
    match kernels.iter().find(|name| !annotated.contains(*name)) {
        None => Ok(out),
        Some(name) => Err(unexpected(format!("the kernel {name} has no line in !nvvm.annotations"))),
    }
}

/// What marks a kernel in its annotation.
const KERNEL: &str = ", !\"kernel\", i32 1";

fn unexpected(what: String) -> Error {
    Error::new(&UNEXPECTED, what).hint("build without --llc libnvvm")
}

/// The functions that `@llvm.used` keeps: `[ ... to i8*), ptr @name, ...]`.
fn kernels(ir: &str) -> BTreeSet<&str> {
    let used = ir.lines().find_map(|line| line.strip_prefix("@llvm.used = ")).unwrap_or_default();
    let mut names = BTreeSet::new();
    let mut rest = used;
    while let Some((name, after)) = symbol(rest) {
        names.insert(name);
        rest = after;
    }
    names
}

/// Splits `!7 = !{void (i8*)* @name, !"maxntidx", i32 256}` around `@name`.
fn annotation(line: &str) -> Option<(&str, &str, &str)> {
    let (number, _) = line.strip_prefix('!')?.split_once(" = !{")?;
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (before, _) = line.split_once('@')?;
    let (name, after) = symbol(line)?;
    after.starts_with(", !\"").then_some((before, name, after))
}

/// The first `@name` in `text`, without its sign, and what follows it. A quoted name keeps its quotes.
fn symbol(text: &str) -> Option<(&str, &str)> {
    let (_, rest) = text.split_once('@')?;
    let end = match rest.strip_prefix('"') {
        Some(quoted) => quoted.find('"')? + 2,
        None => rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_$.-".contains(c))).unwrap_or(rest.len()),
    };
    rest.split_at_checked(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the pin writes it for sm_90: `bounded` has launch bounds, `plain` has none.
    const LEGACY: &str = r#"declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()

define void @bounded({ i8*, i32 } %v0) #0 {
  call void @_RNvhelper() #0
  ret void
}
define void @plain(i8* %v0) #0 {
  ret void
}
define { i32, float } @_RNvhelper() #0 {
  ret { i32, float } undef
}
define internal float @"odd name"(float %x) {
  ret float %x
}
@llvm.used = appending global [2 x i8*] [i8* bitcast (void ({ i8*, i32 })* @bounded to i8*), i8* bitcast (void (i8*)* @plain to i8*)], section "llvm.metadata"
attributes #0 = { convergent }
!0 = !{void (i8*)* @plain, !"kernel", i32 1}
!1 = !{void ({ i8*, i32 })* @bounded, !"maxntidx", i32 256}
!2 = !{void ({ i8*, i32 })* @bounded, !"maxntidy", i32 1}
!nvvm.annotations = !{!0, !1, !2}
!nvvmir.version = !{!3}
!3 = !{i32 2, i32 0, i32 3, i32 1}
"#;

    #[test]
    fn kernels_are_annotated_once_and_helpers_become_internal() {
        let done = complete(LEGACY).unwrap();
        let changed: Vec<_> = done.lines().zip(LEGACY.lines()).filter(|(new, old)| new != old).collect();
        assert_eq!(
            changed,
            [
                (
                    "define internal { i32, float } @_RNvhelper() #0 {",
                    "define { i32, float } @_RNvhelper() #0 {"
                ),
                (
                    "!1 = !{void ({ i8*, i32 })* @bounded, !\"kernel\", i32 1, !\"maxntidx\", i32 256}",
                    "!1 = !{void ({ i8*, i32 })* @bounded, !\"maxntidx\", i32 256}"
                ),
            ]
        );
        assert_eq!(done.lines().count(), LEGACY.lines().count());
        assert_eq!(complete(&done).unwrap(), done, "it is done once");
    }

    #[test]
    fn opaque_pointers_and_quoted_names_are_read() {
        let modern = "define void @\"k 1\"(ptr %v0) {\n}\ndefine void @\"k 2\"() {\n}\n@llvm.used = appending global [1 x ptr] [ptr \
                      @\"k 1\"], section \"llvm.metadata\"\n!0 = !{ptr @\"k 1\", !\"maxntidx\", i32 8}\n";
        let done = complete(modern).unwrap();
        assert!(
            done.contains("define void @\"k 1\"(") && done.contains("define internal void @\"k 2\"("),
            "{done}"
        );
        assert!(done.contains("!0 = !{ptr @\"k 1\", !\"kernel\", i32 1, !\"maxntidx\", i32 8}"), "{done}");
    }

    #[test]
    fn ir_without_kernels_or_without_their_annotation_is_refused() {
        for ir in ["", "define void @k() {\n}\n", "@llvm.used = appending global [0 x ptr] []\n"] {
            assert_eq!(complete(ir).unwrap_err().code().id, "KILN-0396", "{ir}");
        }
        let error = complete(&LEGACY.replace("@bounded, !", "@other, !")).unwrap_err();
        assert_eq!(error.message(), "the kernel bounded has no line in !nvvm.annotations");
    }
}
