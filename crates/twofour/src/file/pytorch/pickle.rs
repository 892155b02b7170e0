//! Pickles, read as data: objects stay the names of their constructors with arguments, and nothing is called.
//!
//! The opcodes are those of Python's pickletools, protocols 0 to 5, as far as `torch.save` and its relatives write
//! them.

use std::collections::HashMap;

/// A value's place among those of its [`Pickle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Id(usize);

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Int(i64),
    Text(String),
    /// None, a boolean, a float, bytes: what no tensor is described by.
    Other,
    Tuple(Vec<Id>),
    List,
    Dict(Vec<(Id, Id)>),
    /// A function or class: module and name.
    Global(String, String),
    /// What the archive holds outside of the pickle.
    Persistent(Id),
    /// A call, with the entries that were set on its result.
    Call {
        function: Id,
        arguments: Id,
        entries: Vec<(Id, Id)>,
    },
}

/// All values of a pickle.
#[derive(Debug)]
pub(super) struct Pickle {
    values: Vec<Value>,
    top: Id,
}

impl Pickle {
    /// Reads a pickle.
    ///
    /// # Errors
    /// What is wrong, and at which byte.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut machine =
            Machine { bytes, at: 0, values: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
        let top = machine.run().map_err(|reason| format!("the pickle, byte {}: {reason}", machine.at))?;
        Ok(Pickle { values: machine.values, top })
    }

    /// The value that the pickle stands for.
    pub(super) fn top(&self) -> Id {
        self.top
    }

    /// A value.
    pub(super) fn get(&self, id: Id) -> &Value {
        &self.values[id.0]
    }

    /// The entries of a dictionary, ordered ones too.
    pub(super) fn entries(&self, id: Id) -> Option<&[(Id, Id)]> {
        match self.get(id) {
            Value::Dict(entries) => Some(entries),
            Value::Call { function, entries, .. } => {
                matches!(self.get(*function), Value::Global(module, name) if module == "collections" && name == "OrderedDict")
                    .then_some(entries)
            }
            _ => None,
        }
    }
}

/// Python's stack machine.
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<usize, Id>,
}

type Outcome<T = ()> = Result<T, String>;

impl Machine<'_> {
    fn run(&mut self) -> Outcome<Id> {
        loop {
            let opcode = self.byte()?;
            match opcode {
                b'.' => return self.pop(),
                0x80 => drop(self.take(1)?),
                0x95 => drop(self.take(8)?),
                b'(' => self.marks.push(self.stack.len()),
                b'}' => self.push(Value::Dict(Vec::new())),
                b']' | 0x8F => self.push(Value::List),
                b')' => self.push(Value::Tuple(Vec::new())),
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.push(Value::Global(module, name));
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    match (self.value(module), self.value(name)) {
                        (Value::Text(module), Value::Text(name)) => {
                            let global = Value::Global(module.clone(), name.clone());
                            self.push(global);
                        }
                        _ => return Err("the name of a global is no text".to_owned()),
                    }
                }
                b'X' | b'T' => self.text(4)?,
                0x8C | b'U' => self.text(1)?,
                0x8D => self.text(8)?,
                b'B' => self.blob(4)?,
                b'C' => self.blob(1)?,
                0x8E | 0x96 => self.blob(8)?,
                b'V' | b'S' | b'F' => {
                    self.line()?;
                    self.push(Value::Other);
                }
                b'I' | b'L' => {
                    let line = self.line()?;
                    let number = line.trim_end_matches('L').parse().map_err(|_| format!("{line:?} is no number"))?;
                    self.push(Value::Int(number));
                }
                b'J' => {
                    let bytes = self.array::<4>()?;
                    self.push(Value::Int(i32::from_le_bytes(bytes).into()));
                }
                b'K' => {
                    let number = self.byte()?;
                    self.push(Value::Int(number.into()));
                }
                b'M' => {
                    let bytes = self.array::<2>()?;
                    self.push(Value::Int(u16::from_le_bytes(bytes).into()));
                }
                0x8A => self.long(1)?,
                0x8B => self.long(4)?,
                b'G' => {
                    self.take(8)?;
                    self.push(Value::Other);
                }
                b'N' | 0x88 | 0x89 => self.push(Value::Other),
                b't' => {
                    let items = self.since_mark()?;
                    self.push(Value::Tuple(items));
                }
                b'l' => {
                    self.since_mark()?;
                    self.push(Value::List);
                }
                b'd' => {
                    let items = self.since_mark()?;
                    let entries = pairs(&items)?;
                    self.push(Value::Dict(entries));
                }
                0x85..=0x87 => {
                    let mut items = Vec::new();
                    for _ in 0..opcode - 0x84 {
                        items.push(self.pop()?);
                    }
                    items.reverse();
                    self.push(Value::Tuple(items));
                }
                b'q' => self.remember(1)?,
                b'r' => self.remember(4)?,
                0x94 => {
                    let top = self.peek()?;
                    self.memo.insert(self.memo.len(), top);
                }
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                b'a' => drop(self.pop()?),
                b'e' | 0x90 => drop(self.since_mark()?),
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.set(vec![(key, value)])?;
                }
                b'u' => {
                    let items = self.since_mark()?;
                    self.set(pairs(&items)?)?;
                }
                b'R' | 0x81 => self.call()?,
                0x92 => {
                    // Arguments by name tell nothing of a tensor.
                    self.pop()?;
                    self.call()?;
                }
                // The state of an object tells nothing of a tensor.
                b'b' => drop(self.pop()?),
                b'Q' => {
                    let id = self.pop()?;
                    self.push(Value::Persistent(id));
                }
                b'0' => drop(self.pop()?),
                b'1' => drop(self.since_mark()?),
                b'2' => {
                    let top = self.peek()?;
                    self.stack.push(top);
                }
                other => return Err(format!("opcode 0x{other:02x} is none that a file of tensors has")),
            }
        }
    }

    fn take(&mut self, count: usize) -> Outcome<&[u8]> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..count)).ok_or("it ends early")?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Outcome<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    fn byte(&mut self) -> Outcome<u8> {
        Ok(self.array::<1>()?[0])
    }

    /// An unsigned number of that many bytes.
    fn number(&mut self, width: usize) -> Outcome<usize> {
        let number = self.take(width)?.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        usize::try_from(number).map_err(|_| format!("{number} is too large a number"))
    }

    fn line(&mut self) -> Outcome<String> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|byte| *byte == b'\n').ok_or("a line does not end")?;
        let line = std::str::from_utf8(self.take(length)?).map_err(|_| "a line is not UTF-8")?.to_owned();
        self.at += 1;
        Ok(line)
    }

    fn text(&mut self, width: usize) -> Outcome {
        let length = self.number(width)?;
        let text = std::str::from_utf8(self.take(length)?).map_err(|_| "a text is not UTF-8")?.to_owned();
        self.push(Value::Text(text));
        Ok(())
    }

    fn blob(&mut self, width: usize) -> Outcome {
        let length = self.number(width)?;
        self.take(length)?;
        self.push(Value::Other);
        Ok(())
    }

    /// A whole number of as many bytes as a number of that width says.
    fn long(&mut self, width: usize) -> Outcome {
        let length = self.number(width)?;
        let bytes = self.take(length)?;
        let value = match bytes.last() {
            None => Value::Int(0),
            // Beyond 64 bits: a seed of random numbers, and no size of a tensor.
            Some(_) if bytes.len() > 8 => Value::Other,
            Some(last) => {
                let sign = if last & 0x80 != 0 { -1i64 } else { 0 };
                Value::Int(bytes.iter().rev().fold(sign, |number, byte| number << 8 | i64::from(*byte)))
            }
        };
        self.push(value);
        Ok(())
    }

    fn push(&mut self, value: Value) {
        self.stack.push(Id(self.values.len()));
        self.values.push(value);
    }

    fn value(&self, id: Id) -> &Value {
        &self.values[id.0]
    }

    fn peek(&self) -> Outcome<Id> {
        self.stack.last().copied().ok_or_else(|| "the stack is empty".to_owned())
    }

    fn pop(&mut self) -> Outcome<Id> {
        let top = self.peek()?;
        if self.marks.last().is_some_and(|mark| self.stack.len() <= *mark) {
            return Err("a value is taken from below a mark".to_owned());
        }
        self.stack.pop();
        Ok(top)
    }

    fn since_mark(&mut self) -> Outcome<Vec<Id>> {
        let mark = self.marks.pop().ok_or("there is no mark")?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn remember(&mut self, width: usize) -> Outcome {
        let place = self.number(width)?;
        let top = self.peek()?;
        self.memo.insert(place, top);
        Ok(())
    }

    fn recall(&mut self, width: usize) -> Outcome {
        let place = self.number(width)?;
        let id = *self.memo.get(&place).ok_or_else(|| format!("nothing was stored as {place}"))?;
        self.stack.push(id);
        Ok(())
    }

    fn set(&mut self, new: Vec<(Id, Id)>) -> Outcome {
        let target = self.peek()?;
        match &mut self.values[target.0] {
            Value::Dict(entries) | Value::Call { entries, .. } => {
                entries.extend(new);
                Ok(())
            }
            _ => Err("entries are set on what is no dictionary".to_owned()),
        }
    }

    fn call(&mut self) -> Outcome {
        let (arguments, function) = (self.pop()?, self.pop()?);
        self.push(Value::Call { function, arguments, entries: Vec::new() });
        Ok(())
    }
}

/// Keys with their values.
fn pairs(items: &[Id]) -> Outcome<Vec<(Id, Id)>> {
    match items.as_chunks::<2>() {
        (pairs, []) => Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect()),
        _ => Err("a key has no value".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dictionaries_are_read_and_what_is_set_later_is_seen_through_the_memo() {
        // {"a": d, "b": d} with d an OrderedDict that gets its entry after it was stored in the memo.
        let bytes = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01ccollections\nOrderedDict\nq\x02)Rq\x03(X\x01\x00\x00\x00kK\x07uX\x01\x00\x00\x00bh\x03u.";
        let pickle = Pickle::parse(bytes).unwrap();
        let entries = pickle.entries(pickle.top()).unwrap();
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[0].1, entries[1].1);
        let [(key, value)] = pickle.entries(entries[1].1).unwrap() else { panic!("one entry") };
        assert_eq!((pickle.get(*key), pickle.get(*value)), (&Value::Text("k".to_owned()), &Value::Int(7)));
    }

    #[test]
    fn whole_numbers_have_their_signs() {
        for (bytes, expected) in [
            (&b"J\xff\xff\xff\xff."[..], -1),
            (b"K\xff.", 255),
            (b"M\x00\x01.", 256),
            (b"\x8a\x00.", 0),
            (b"\x8a\x01\x80.", -128),
            (b"\x8a\x02\xff\x00.", 255),
            (b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80.", i64::MIN),
            (b"I42\n.", 42),
            (b"L-3L\n.", -3),
        ] {
            let pickle = Pickle::parse(bytes).unwrap();
            assert_eq!(pickle.get(pickle.top()), &Value::Int(expected), "{bytes:?}");
        }
    }

    #[test]
    fn damaged_pickles_are_errors_with_their_place() {
        for (bytes, expected) in [
            (&b""[..], "ends early"),
            (b".", "stack is empty"),
            (b"X\xff\xff\xff\xffa.", "ends early"),
            (b"K\x01t.", "no mark"),
            (b"K\x01(R.", "below a mark"),
            (b"h\x09.", "nothing was stored as 9"),
            (b"K\x01K\x02K\x03s.", "no dictionary"),
            (b"}(K\x01u.", "a key has no value"),
            (b"K\x01K\x02\x93.", "no text"),
            (b"cos", "does not end"),
            (b"P.", "opcode 0x50"),
            (b"X\x01\x00\x00\x00\xff.", "not UTF-8"),
        ] {
            let error = Pickle::parse(bytes).unwrap_err();
            assert!(error.contains(expected) && error.contains("byte "), "{bytes:?}: {error}");
        }
    }
}
