//! The rooms of the crate and what each may know: a room uses the rooms below it and never one above, and no files use
//! each other in a circle.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};

/// From the lowest to the highest. `lib.rs` and `main.rs` only name the rooms and dispatch.
const ROOMS: &[&str] = &[
    "report", "base", "pins", "machine", "ptx", "store", "source", "backend", "plan", "build", "gate",
    "setup", "verify", "repin", "cmd",
];

/// A module's path below the crate, and the file that it stands in.
struct File {
    module: Vec<String>,
    path: PathBuf,
    uses: Vec<Use>,
}

/// The path below the crate that a line names.
struct Use {
    line: usize,
    path: Vec<String>,
}

struct Uses<'a> {
    module: &'a [String],
    /// Modules inside of the file around the present item.
    inner: Vec<String>,
    /// Modules that the file declares and that are files of their own.
    children: BTreeSet<String>,
    found: Vec<Use>,
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|what| what.is_ident("test"))
    })
}

impl Uses<'_> {
    /// Notes a path that begins with `crate`, `super`, `self` or a module that is declared here.
    fn note(&mut self, line: usize, segments: &[String]) {
        let mut base: Vec<String> = self.module.iter().chain(&self.inner).cloned().collect();
        let mut rest = segments;
        match segments.first().map(String::as_str) {
            Some("crate") => {
                base.clear();
                rest = &segments[1..];
            }
            Some("self") => rest = &segments[1..],
            Some("super") => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            Some(first) if self.children.contains(first) => {}
            _ => return,
        }
        base.extend_from_slice(rest);
        self.found.push(Use { line, path: base });
    }

    fn tree(&mut self, line: usize, prefix: &mut Vec<String>, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.tree(line, prefix, &path.tree);
                prefix.pop();
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.tree(line, prefix, tree);
                }
            }
            syn::UseTree::Name(syn::UseName { ident })
            | syn::UseTree::Rename(syn::UseRename { ident, .. }) => {
                let mut path = prefix.clone();
                if ident != "self" {
                    path.push(ident.to_string());
                }
                self.note(line, &path);
            }
            syn::UseTree::Glob(_) => self.note(line, prefix),
        }
    }

    /// Paths among the tokens of a macro's arguments, which are no syntax yet.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut line = 0;
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) if path.is_empty() || colons == 2 => {
                    if path.is_empty() {
                        line = ident.span().start().line;
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                other => {
                    self.note(line, &std::mem::take(&mut path));
                    colons = 0;
                    match other {
                        TokenTree::Group(group) => self.tokens(group.stream()),
                        TokenTree::Ident(ident) => {
                            line = ident.span().start().line;
                            path.push(ident.to_string());
                        }
                        _ => {}
                    }
                }
            }
        }
        self.note(line, &path);
    }
}

impl<'ast> Visit<'ast> for Uses<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if !is_test(&item.attrs) {
            self.tree(item.span().start().line, &mut Vec::new(), &item.tree);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            self.inner.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.inner.pop();
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.note(path.span().start().line, &segments);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.tokens(mac.tokens.clone());
        visit::visit_macro(self, mac);
    }
}

fn files_below(folder: &Path, module: &[String], files: &mut Vec<File>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let mut module = module.to_vec();
        if path.is_dir() {
            module.push(stem);
            files_below(&path, &module, files);
        } else if path.extension().is_some_and(|end| end == "rs")
            && !["lib", "main", "tests"].contains(&&*stem)
        {
            if stem != "mod" {
                module.push(stem);
            }
            files.push(File { uses: uses(&std::fs::read_to_string(&path).unwrap(), &module), module, path });
        }
    }
}

fn uses(text: &str, module: &[String]) -> Vec<Use> {
    let file = syn::parse_file(text).unwrap();
    let children = file.items.iter().filter_map(|item| match item {
        syn::Item::Mod(item) if item.content.is_none() && !is_test(&item.attrs) => {
            Some(item.ident.to_string())
        }
        _ => None,
    });
    let children = children.collect();
    let mut uses = Uses { module, inner: Vec::new(), children, found: Vec::new() };
    uses.visit_file(&file);
    uses.found
}

/// For every file those that it uses, with the line and the path of the first such use.
type Edges = Vec<BTreeMap<usize, (usize, String)>>;

/// Every file of the crate.
fn graph() -> (Vec<File>, Edges) {
    let mut files = Vec::new();
    files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut files);
    let edges = edges(&files);
    (files, edges)
}

fn edges(files: &[File]) -> Edges {
    let by_module: BTreeMap<_, _> =
        files.iter().enumerate().map(|(index, file)| (file.module.clone(), index)).collect();
    let edges = files.iter().enumerate().map(|(from, file)| {
        let mut edges = BTreeMap::new();
        for Use { line, path } in &file.uses {
            let target = (1..=path.len()).rev().find_map(|len| by_module.get(&path[..len]));
            if let Some(to) = target.filter(|to| **to != from) {
                edges.entry(*to).or_insert((*line, path.join("::")));
            }
        }
        edges
    });
    edges.collect()
}

fn name(file: &File) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    file.path.strip_prefix(root).unwrap().display().to_string()
}

fn room(file: &File) -> usize {
    let room = &file.module[0];
    ROOMS.iter().position(|known| known == room).unwrap_or_else(|| {
        panic!("{} is in no room: declare {room} among the rooms, in its place", name(file))
    })
}

#[test]
fn no_room_uses_a_higher_one() {
    let (files, edges) = graph();
    assert!(files.len() > 60, "only {} files were read", files.len());
    let mut upward = String::new();
    for (from, edges) in edges.iter().enumerate() {
        for (to, (line, path)) in edges {
            if room(&files[*to]) > room(&files[from]) {
                writeln!(upward, "{}:{line} uses crate::{path}", name(&files[from])).unwrap();
            }
        }
    }
    assert!(upward.is_empty(), "the order is {}; these go up:\n{upward}", ROOMS.join(" < "));
}

#[test]
fn only_the_command_line_knows_of_clap() {
    let mut files = Vec::new();
    files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut files);
    for file in files.iter().filter(|file| file.module[0] != "cmd") {
        let text = std::fs::read_to_string(&file.path).unwrap();
        assert!(!text.contains("clap::"), "{} knows of clap", name(file));
    }
}

/// Every use that is part of a circle, one a line.
///
/// A parent module and what lies below it may know each other: what goes from one to the other and back is no circle. One that
/// passes through them and through a third file that is in neither is.
fn circles(files: &[File]) -> String {
    let edges = edges(files);
    let related = |a: usize, b: usize| {
        files[a].module.starts_with(&files[b].module) || files[b].module.starts_with(&files[a].module)
    };
    let reach = |start: usize, through: &dyn Fn(usize) -> bool| {
        let mut reached = BTreeSet::new();
        let mut open = vec![start];
        while let Some(from) = open.pop() {
            open.extend(edges[from].keys().filter(|to| through(**to) && reached.insert(**to)));
        }
        reached
    };
    let mut circles = String::new();
    for (from, uses) in edges.iter().enumerate() {
        for (to, (line, path)) in uses.iter().filter(|(to, _)| !related(from, **to)) {
            // The modules around both are no way from one to the other.
            let common =
                files[from].module.iter().zip(&files[*to].module).take_while(|(a, b)| a == b).count();
            let around = &files[from].module[..common];
            let through = |next: usize| !around.starts_with(&files[next].module);
            if reach(*to, &through).contains(&from) {
                writeln!(circles, "{}:{line} uses crate::{path}", name(&files[from])).unwrap();
            }
        }
    }
    circles
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let circles = circles(&graph().0);
    assert!(circles.is_empty(), "files use each other in a circle:\n{circles}");
}

#[test]
fn circles_are_told_from_families() {
    let found = |files: &[(&str, &str)]| {
        let files: Vec<File> = files
            .iter()
            .map(|(module, text)| {
                let module: Vec<String> = module.split("::").map(str::to_owned).collect();
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(module.join("/"));
                File { uses: uses(text, &module), module, path }
            })
            .collect();
        circles(&files)
    };
    let child = ("r::a::c", "use super::A;");
    let parent = ("r::a", "mod c; use self::c::C;");
    assert_eq!(found(&[parent, child]), "");
    let sibling = ("r::a::d", "use super::c::C;");
    assert_eq!(found(&[parent, child, sibling]), "");
    // Two children that know each other.
    let back = ("r::a::c", "use super::d::D;");
    assert_eq!(
        found(&[parent, back, sibling]),
        "xtask/r/a/c:1 uses crate::r::a::d::D\nxtask/r/a/d:1 uses crate::r::a::c::C\n"
    );
    // Through a parent and its child: a -> c -> b -> a, whether the parent says `self::` or not.
    let other = ("r::b", "use crate::r::a::A;");
    let far = ("r::a::c", "use crate::r::b::B;");
    for text in ["mod c; use self::c::C;", "mod c; fn f() { c::g(); }"] {
        assert_eq!(
            found(&[("r::a", text), far, other]),
            "xtask/r/a/c:1 uses crate::r::b::B\nxtask/r/b:1 uses crate::r::a::A\n"
        );
    }
}

#[test]
fn every_way_to_name_a_module_is_seen() {
    let text = "use crate::a::{self, b::{C, D as E}};\nuse super::f::*;\nmod inner { use super::g; }\n\
                fn h() { crate::i::j(); let _ = format!(\"{}\", crate::k::L); }\n\
                #[cfg(test)] mod tests { use crate::unseen; }";
    let found: Vec<String> = uses(text, &["top".to_owned(), "file".to_owned()])
        .into_iter()
        .map(|found| found.path.join("::"))
        .collect();
    assert_eq!(found, ["a", "a::b::C", "a::b::D", "top::f", "top::file::g", "i::j", "k::L"]);
}
