from jln._triton import launch, config
def missing(platform):
    return launch.missing() if platform == "cuda" else f"not for {platform}"
def on(platform, spread):
    raise RuntimeError("stub")
