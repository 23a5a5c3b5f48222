//! `docs/clusters.md` as far as it can be tried here: two machines, each a network namespace, that do what it says.

use crate::machines::{Machines, inside, run_together};
use crate::python;
use crate::shell::{Result, command, output, root, run};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(180);

/// Stands for a login on another machine: `agent MACHINE COMMAND...`.
const AGENT: &str = "#!/bin/sh
machine=$1
shift
exec ip netns exec $machine unshare --uts sh -c \"hostname $machine; $*\"
";

/// A block of the document, with its language.
struct Block<'a> {
    language: &'a str,
    text: &'a str,
}

/// Checks all of it. The program and the Python package must have been built.
pub(crate) fn check() -> Result {
    if !inside(&["clusters"])? {
        return Ok(());
    }
    let path = root().join("docs/clusters.md");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let blocks = blocks(&text);
    for block in &blocks {
        match block.language {
            "bash" => run(command("bash", &["-n", "-c"]).arg(block.text))?,
            "yaml" => check_yaml(block.text)?,
            _ => {}
        }
    }
    let find = |language: &str, word: &str| {
        let block = blocks.iter().find(|block| block.language == language && block.text.contains(word));
        block.map(|block| block.text).ok_or(format!("{}: no block with {word}", path.display()))
    };
    let machines = Machines::new(2, None)?;
    torchrun(&machines, find("bash", "--rdzv-endpoint MACHINE-1")?)?;
    mpirun(&machines, find("text", "slots")?, find("bash", "--hostfile hosts")?)
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let fenced = text.split("```").skip(1).step_by(2);
    fenced
        .filter_map(|block| block.split_once('\n'))
        .map(|(language, text)| Block { language, text })
        .collect()
}

fn check_yaml(text: &str) -> Result {
    let program = "import sys, yaml; job = yaml.safe_load(sys.argv[1]); \
        specs = next(value for key, value in job['spec'].items() if key.endswith('ReplicaSpecs')); \
        assert all(spec['template']['spec']['containers'][0]['image'] for spec in specs.values()); \
        print('clusters:', job['kind'], {name: spec['replicas'] for name, spec in specs.items()})";
    let mut python = Command::new(python::environment().join("bin/python"));
    print!("{}", output(python.args(["-c", program, text]))?);
    Ok(())
}

/// The same command on both machines, as the document has it, with few samples.
fn torchrun(machines: &Machines, block: &str) -> Result {
    let block = block.replace("MACHINE-", "machine-").replace("INTERFACE", "eth");
    let data = root().join("target/clusters/mnist");
    stand_in(&data).map_err(|error| format!("{}: {error}", data.display()))?;
    let block = block.trim_end().replace("--nproc-per-node 4", "--nproc-per-node 1");
    let block = format!("{block} --epochs 1 --data {}", data.display());
    let path = format!(
        "{}:{}",
        python::environment().join("bin").display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let on = |machine: usize| {
        let mut shell = machines.on(machine);
        shell.args(["bash", "-ec", &block]).env("PATH", &path);
        shell
    };
    run_together((0..2).map(on).collect(), LIMIT)?;
    println!("clusters: torchrun on two machines");
    Ok(())
}

/// Pictures of nothing in MNIST's format: what is tried here is how learners find each other.
fn stand_in(folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    for (part, count) in [("train", 1000u32), ("t10k", 100)] {
        let sizes = [count, 28, 28].map(u32::to_be_bytes).concat();
        let pictures = (0..count * 28 * 28).map(|at| (at % 251) as u8);
        let images: Vec<u8> = [0, 0, 8, 3].into_iter().chain(sizes).chain(pictures).collect();
        fs::write(folder.join(format!("{part}-images-idx3-ubyte")), images)?;
        let labels = (0..count).map(|at| (at % 10) as u8);
        let labels: Vec<u8> = [0, 0, 8, 1].into_iter().chain(count.to_be_bytes()).chain(labels).collect();
        fs::write(folder.join(format!("{part}-labels-idx1-ubyte")), labels)?;
    }
    Ok(())
}

/// One process a machine, started from the first.
fn mpirun(machines: &Machines, list: &str, block: &str) -> Result {
    let folder = root().join("target/clusters");
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::create_dir_all(&folder)
            .and_then(|()| fs::write(&path, text))
            .map_err(|error| format!("{}: {error}", path.display()))?;
        Ok::<_, String>(path)
    };
    let list = list.replace("MACHINE-", "machine-").replace("slots=4", "slots=1");
    let list = write("hosts", &list)?;
    let agent = write("agent", AGENT)?;
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).map_err(|error| error.to_string())?;
    let out = folder.join("run");
    let _ = fs::remove_dir_all(&out);
    let block = block.replace("INTERFACE", "eth").replace("-n 8", "-n 2").replace("mnist-cnn", "digits");
    // What the tests have built.
    let block = block.replace("target/release/", "target/debug/");
    let block = block.replace("--hostfile hosts", &format!("--hostfile {}", list.display()));
    let block = block.trim_end().replace("--epochs 3", "--steps 20") + &format!(" --out {}", out.display());
    let mut shell = machines.on(0);
    shell.args(["bash", "-ec", &block]);
    shell.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    shell.env("OMPI_MCA_plm_rsh_agent", agent).env("OMPI_MCA_oob_tcp_if_include", "eth");
    run_together(vec![shell], LIMIT)?;
    println!("clusters: mpirun on two machines");
    Ok(())
}
