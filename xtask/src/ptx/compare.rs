//! How two builds of an entry differ: not at all, in order alone, or in what class of instruction.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::listing::{Entry, Instruction, class};

/// What became of an entry from build A to build B.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "what", rename_all = "kebab-case")]
pub enum Difference {
    /// The canonical text is the same.
    Identical,
    /// The same instructions, in another order or with other registers.
    Reordered,
    /// Other instructions or declarations; what differs, each as a phrase.
    Differs(Vec<String>),
    /// Only A has it.
    Gone,
    /// Only B has it.
    New,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Identical => f.write_str("identical"),
            Difference::Reordered => f.write_str("reordered only"),
            Difference::Differs(what) => write!(f, "differs: {}", what.join("; ")),
            Difference::Gone => f.write_str("only in A"),
            Difference::New => f.write_str("only in B"),
        }
    }
}

/// Compares every entry of `a` and `b`.
pub fn entries(a: &BTreeMap<String, Entry>, b: &BTreeMap<String, Entry>) -> BTreeMap<String, Difference> {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    names
        .into_iter()
        .map(|name| {
            let difference = match (a.get(name), b.get(name)) {
                (Some(a), Some(b)) => entry(a, b),
                (Some(_), None) => Difference::Gone,
                (None, _) => Difference::New,
            };
            (name.clone(), difference)
        })
        .collect()
}

/// Compares two builds of one entry.
pub fn entry(a: &Entry, b: &Entry) -> Difference {
    if a.canonical == b.canonical {
        return Difference::Identical;
    }
    let mut what = Vec::new();
    let (one, two) = (count(&a.instructions), count(&b.instructions));
    if one != two {
        let (mix_a, mix_b) = (a.mix(), b.mix());
        let mut classes: BTreeSet<String> = BTreeSet::new();
        for instruction in one.keys().chain(two.keys()) {
            if one.get(instruction) != two.get(instruction) {
                classes.insert(class(&instruction.opcode));
            }
        }
        for class in classes {
            let (was, is) =
                (mix_a.get(&class).copied().unwrap_or(0), mix_b.get(&class).copied().unwrap_or(0));
            what.push(if was == is {
                format!("{class}: other forms or operands")
            } else {
                format!("{class} {was} -> {is}")
            });
        }
    }
    if a.declarations != b.declarations {
        what.push("declarations".to_owned());
    }
    if what.is_empty() { Difference::Reordered } else { Difference::Differs(what) }
}

fn count(instructions: &[Instruction]) -> BTreeMap<&Instruction, usize> {
    let mut counts = BTreeMap::new();
    for instruction in instructions {
        *counts.entry(instruction).or_default() += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::listing::Listing;

    const REAL: &str = include_str!("../../tests/fixtures/ptx/dot_product_sm_90_llc22.ptx");

    fn changed(from: &str, to: &str) -> String {
        assert!(REAL.contains(from), "{from}");
        let (a, b) = (Listing::parse(REAL), Listing::parse(&REAL.replace(from, to)));
        entries(&a.entries, &b.entries)["k"].to_string()
    }

    #[test]
    fn the_class_of_what_differs_is_named() {
        assert_eq!(changed("mul.rn.f32", "mul.rn.f32"), "identical");
        assert_eq!(changed("mul.rn.f32", "mul.rz.f32"), "differs: mul.rn.f32 1 -> 0; mul.rz.f32 0 -> 1");
        assert_eq!(changed(".visible .entry k(", ".visible .entry j("), "only in A");
        assert_eq!(changed("\tret;", "\tbar.sync 0;\n\tret;"), "differs: bar 0 -> 1");
        assert_eq!(changed(".visible", ".visible .extern_attribute"), "differs: declarations");
    }

    #[test]
    fn another_order_or_other_registers_are_no_other_instructions() {
        let lines = "\tadd.s32 \t%r1, %r2, 1;\n\txor.b32 \t%r3, %r4, 2;\n\tret;";
        let swapped = "\txor.b32 \t%r3, %r4, 2;\n\tadd.s32 \t%r7, %r2, 1;\n\tret;";
        let of = |tail: &str| Listing::parse(&REAL.replace("\tret;", tail)).entries["k"].clone();
        assert_eq!(entry(&of(lines), &of(swapped)), Difference::Reordered);
        let other = swapped.replace(", 1;", ", 3;");
        assert_eq!(entry(&of(lines), &of(&other)).to_string(), "differs: int: other forms or operands");
    }
}
