//! Documents of which a part is written by a command.

use crate::shell::Result;
use std::fs;
use std::path::Path;

/// The text of a document with the parts between `<!-- NAME: ... -->` and `<!-- end of NAME -->` replaced.
pub(crate) fn with_parts(path: &Path, parts: &[(&str, String)]) -> Result<String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    parts.iter().try_fold(text, |text, (name, part)| {
        replaced(&text, name, part).ok_or_else(|| {
            format!("{}: the lines around what is written for {name} are missing", path.display())
        })
    })
}

fn replaced(text: &str, name: &str, part: &str) -> Option<String> {
    let start = text.find(&format!("<!-- {name}: "))?;
    let begin = start + text[start..].find("-->")? + "-->\n".len();
    let end = begin + text[begin..].find(&format!("<!-- end of {name} -->"))?;
    Some([&text[..begin], part, &text[end..]].concat())
}

/// What is written by a command: files and what they must have in them.
pub(crate) struct Written<'a> {
    /// The command that writes them.
    pub(crate) by: &'a str,
    pub(crate) files: Vec<(std::path::PathBuf, String)>,
}

impl Written<'_> {
    pub(crate) fn save(&self) -> Result {
        self.files.iter().try_for_each(|(path, text)| {
            fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
        })
    }

    /// Whether all of it is there as it should be.
    pub(crate) fn check(&self) -> Result {
        self.files.iter().try_for_each(|(path, expected)| match fs::read_to_string(path) {
            Ok(text) if text == *expected => Ok(()),
            _ => Err(format!("{} is not what the results give: run `{}`", path.display(), self.by)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::replaced;

    #[test]
    fn only_the_part_between_the_marks_changes() {
        let text = "a\n<!-- one: by x -->\nold\n<!-- end of one -->\nb\n";
        let expected = "a\n<!-- one: by x -->\nnew\n<!-- end of one -->\nb\n";
        assert_eq!(replaced(text, "one", "new\n").as_deref(), Some(expected));
        assert_eq!(replaced(text, "two", ""), None);
    }
}
