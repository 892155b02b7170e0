//! Files of weight shapes: `--shapes FILE`.
//!
//! Text has a weight on each line, `OUT IN [NAME]`, and `#` begins a comment. JSON is a list of lists, `[[OUT, IN,
//! "NAME"], [OUT, IN]]`.

use std::{fmt, fs, path::Path};

use serde::{
    Deserialize, Deserializer,
    de::{self, SeqAccess, Visitor},
};

use twofour_cli::exit::Usage;

use super::layers::GridLayer;

/// The largest dimension of a weight, and the most elements: 2 GiB in bf16.
const MOST: usize = 1 << 20;
const MAX_ELEMENTS: usize = 1 << 30;

/// Returns the distinct weights of a file.
///
/// # Errors
/// [`Usage`] with the file's name, the line and what is wrong there.
pub(super) fn read(path: &Path) -> Result<Vec<GridLayer>, Usage> {
    let shown = path.display();
    let text = fs::read_to_string(path).map_err(|error| Usage(format!("--shapes {shown}: {error}")))?;
    let weights = if text.trim_start().starts_with('[') { of_json(&text) } else { of_text(&text) };
    let weights = weights.map_err(|error| Usage(format!("--shapes {shown}: {error}")))?;
    if weights.is_empty() {
        return Err(Usage(format!("--shapes {shown}: has no shapes; write OUT IN [NAME] on each line")));
    }
    Ok(GridLayer::distinct(weights.into_iter().map(|weight| (weight.name, weight.shape))))
}

/// A weight of the file.
#[derive(Debug, PartialEq, Eq)]
struct Weight {
    name: String,
    shape: [usize; 2],
}

impl Weight {
    fn new(name: &str, shape: [usize; 2]) -> Result<Self, String> {
        let [out, inputs] = shape;
        if shape.iter().any(|size| !(1..=MOST).contains(size)) {
            return Err(format!("{out} by {inputs}: each size must be at least 1 and at most {MOST}"));
        }
        if out * inputs > MAX_ELEMENTS {
            return Err(format!("{out} by {inputs}: more than {MAX_ELEMENTS} elements"));
        }
        Ok(Self { name: name.trim().to_owned(), shape })
    }
}

fn of_text(text: &str) -> Result<Vec<Weight>, String> {
    let mut weights = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            weights.push(of_line(line).map_err(|error| format!("line {}: {error}", number + 1))?);
        }
    }
    Ok(weights)
}

fn of_line(line: &str) -> Result<Weight, String> {
    let (out, rest) = line.split_once(char::is_whitespace).ok_or_else(|| format!("`{line}` is not OUT IN [NAME]"))?;
    let rest = rest.trim_start();
    let (inputs, name) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is not a number of features"));
    Weight::new(name, [number(out)?, number(inputs)?])
}

/// Errors name the line and the column: serde_json adds them to those of elements, too.
fn of_json(text: &str) -> Result<Vec<Weight>, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Weight;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[OUT, IN] or [OUT, IN, \"NAME\"]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Weight, A::Error> {
                let out = list.next_element()?.ok_or_else(|| de::Error::invalid_length(0, &self))?;
                let inputs = list.next_element()?.ok_or_else(|| de::Error::invalid_length(1, &self))?;
                let name: Option<String> = list.next_element()?;
                Weight::new(&name.unwrap_or_default(), [out, inputs]).map_err(de::Error::custom)
            }
        }
        deserializer.deserialize_seq(List)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(name: &str, shape: [usize; 2]) -> Weight {
        Weight { name: name.to_owned(), shape }
    }

    #[test]
    fn text_and_json_name_the_same_weights() {
        let expected = vec![weight("gate and up", [14336, 4096]), weight("", [5, 7])];
        assert_eq!(of_text("# layers\n\n14336 4096  gate and up # fused\n 5\t7\n").unwrap(), expected);
        assert_eq!(of_json("[[14336, 4096, \"gate and up\"],\n [5, 7]]").unwrap(), expected);
    }

    #[test]
    fn errors_name_the_line() {
        for (text, line, what) in [
            ("4096", "line 1", "OUT IN"),
            ("8 8\n\n4096 x\n", "line 3", "`x`"),
            ("8 8\n0 8", "line 2", "at least 1"),
            ("-8 8", "line 1", "`-8`"),
            ("1048577 8", "line 1", "at most 1048576"),
            ("1048576 1048576", "line 1", "elements"),
            ("99999999999999999999 8", "line 1", "not a number"),
        ] {
            let error = of_text(text).unwrap_err();
            assert!(error.starts_with(line) && error.contains(what), "{text}: {error}");
        }
        for (text, line, what) in [
            ("[[8, 8],\n [8]]", "line 2", "[OUT, IN]"),
            ("[[8, 8],\n [8, 0]]", "line 2", "at least 1"),
            ("[[8, 8, 8]]", "line 1", "string"),
            ("[[8, 8, \"a\", 1]]", "line 1", "trailing"),
            ("[{\"out\": 8}]", "line 1", "[OUT, IN]"),
            ("[[8, 8]", "line 1", "EOF"),
        ] {
            let error = of_json(text).unwrap_err();
            assert!(error.contains(line) && error.contains(what), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_without_shapes_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("shapes");
        for text in ["", "# none\n", "[]"] {
            fs::write(&path, text).unwrap();
            assert!(read(&path).unwrap_err().to_string().contains("has no shapes"), "{text}");
        }
        fs::write(&path, [0xFF, 0xFE]).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("UTF-8"));
        assert!(read(&folder.path().join("none")).unwrap_err().to_string().contains("none"));
        fs::write(&path, "8 16 a\n16 16\n8 16 b\n8 16 a\n").unwrap();
        let layers = read(&path).unwrap();
        assert_eq!(layers.len(), 2);
        assert_eq!(
            (layers[1].out, layers[1].inputs, layers[1].names.as_slice()),
            (8, 16, &["a".into(), "b".into()][..])
        );
    }
}
