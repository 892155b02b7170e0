//! Modules of the crate import each other in one direction.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Sources, but for tests.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let is_of_tests = path.file_stem().is_some_and(|name| name.to_string_lossy().contains("tests"));
        match path.is_dir() {
            _ if is_of_tests => {}
            true => sources(&path, found),
            false if path.extension().is_some_and(|extension| extension == "rs") => found.push(path),
            false => {}
        }
    }
}

fn name(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The modules whose paths a source names by `crate::`, without comments and tests.
fn imports(source: &str) -> BTreeSet<String> {
    let source = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let source: String = lines.flat_map(|line| [line, "\n"]).collect();
    let mut found = BTreeSet::new();
    for (at, path) in source.match_indices("crate::") {
        let rest = &source[at + path.len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.insert(name(rest));
            continue;
        };
        let (mut depth, mut begins) = (0usize, true);
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                c if begins && !c.is_whitespace() => {
                    found.insert(name(&list[at..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn no_module_imports_one_that_imports_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = vec![];
    sources(&root, &mut files);
    let module = |path: &Path| name(&path.strip_prefix(&root).unwrap().to_string_lossy());
    let modules: BTreeSet<String> = files.iter().map(|path| module(path)).collect();
    let mut below: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in &files {
        // The error of the crate has those of all modules, and all modules return it.
        let own = module(path);
        let imports = imports(&fs::read_to_string(path).unwrap());
        let others = imports.into_iter().filter(|other| modules.contains(other) && *other != own && own != "error");
        below.entry(own.clone()).or_default().extend(others.filter(|other| other != "error"));
    }
    assert!(below["recipe"].contains("train") && below["train"].contains("model"), "{below:#?}");
    let mut left = below.clone();
    while let Some(floor) = left.iter().find(|(_, below)| below.iter().all(|other| !left.contains_key(other))) {
        let floor = floor.0.clone();
        left.remove(&floor);
    }
    assert!(left.is_empty(), "these import each other in circles: {left:#?}");
    let importers: Vec<_> = below.iter().filter(|(_, below)| below.contains("recipe")).map(|(name, _)| name).collect();
    assert!(importers.is_empty(), "{importers:?} import recipes");
}
